"""Pages of 16 tokens: block tables of requests."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError

from .page_pool import PagePool

PAGE_TOKENS = 16


@dataclass(frozen=True)
class RequestPages:
    """Block tables of B requests.

    Attributes:
        tables: ``[B, n]`` int64 page ids; logical page i holds positions 16 i to 16 i + 15. Entries past a
            request's own pages are -1 and belong to nobody.
    """

    tables: Tensor

    def slots(self, positions: Tensor) -> Tensor:
        """Physical slots ``page * 16 + offset`` of positions ``[B, T]``, int64 ``[B, T]``."""
        page = torch.div(positions, PAGE_TOKENS, rounding_mode="floor")
        return self.tables.gather(1, page) * PAGE_TOKENS + positions % PAGE_TOKENS


class BlockTables:
    """Block tables of the open requests, shared by all layers.

    Args:
        requests: rows. pages: of all requests together.
        pages_per_request: the most that one request may hold; all of them by default.
    """

    def __init__(
        self, requests: int, pages: int, device: torch.device, pages_per_request: int | None = None
    ) -> None:
        self.pool = PagePool(pages, PAGE_TOKENS)
        self.device = device
        self._pages: dict[int, list[int]] = {}
        self._closed = list(range(requests))
        width = pages if pages_per_request is None else min(pages, pages_per_request)
        # Never moves: captured graphs hold on to its address.
        self._tables = torch.full((requests, width), -1, dtype=torch.int64, device=device)

    def open(self) -> int:
        """Takes a request row without pages.

        Raises:
            InputError: all rows are taken.
        """
        if not self._closed:
            raise InputError(f"all {len(self._pages)} request rows are in use: raise max_requests")
        request = heapq.heappop(self._closed)
        self._pages[request] = []
        return request

    def reserve(self, request: int, length: int) -> None:
        """Grows the request's table to hold ``length`` tokens; nothing waits for the device.

        Raises:
            InputError: too few pages are free, or the request would hold too many; nothing is taken then.
        """
        pages = self._pages[request]
        more = self.missing(request, length)
        if more == 0:
            return
        if len(pages) + more > self._tables.shape[1]:
            raise InputError(
                f"{length} tokens are more than one request may hold, {self._tables.shape[1] * PAGE_TOKENS}"
            )
        self._append(request, self.pool.allocate(more))

    def missing(self, request: int, length: int) -> int:
        """Pages that :meth:`reserve` would take."""
        return max(0, pages_for(length) - len(self._pages[request]))

    def share(self, request: int, pages: list[int]) -> None:
        """Appends pages that others hold, or that are kept, to a request's table."""
        self.pool.share(pages)
        self._append(request, pages)

    def close(self, request: int) -> None:
        """Gives the request's pages back, and its row."""
        self.pool.release(self._pages.pop(request))
        self._tables[request].fill_(-1)
        heapq.heappush(self._closed, request)

    @property
    def tensor(self) -> Tensor:
        """All tables, int64 ``[requests, pages]``."""
        return self._tables

    def slots(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Physical slots ``page * 16 + offset`` of rows, -1 for padded ones; all are int64 ``[N]``.

        Args:
            requests: -1: a padded row. positions: in pages that the requests own.
        """
        page = self._tables[requests.clamp_min(0), positions.clamp_min(0) // PAGE_TOKENS]
        return torch.where(requests < 0, -1, page * PAGE_TOKENS + positions % PAGE_TOKENS)

    def of(self, requests: Tensor, length: int) -> RequestPages:
        """Tables of requests ``[B]``, as wide as ``length`` tokens need."""
        return RequestPages(self._tables[requests, : pages_for(length)])

    def pages(self, request: int) -> list[int]:
        """The pages a request holds, in the order of its tokens."""
        return list(self._pages[request])

    def check(self) -> None:
        """Raises RuntimeError on a page that leaked or was freed twice."""
        self.pool.check(list(self._pages.values()))

    def _append(self, request: int, new: list[int]) -> None:
        if not new:
            return
        held = self._pages[request]
        pinned = torch.tensor(new, pin_memory=self.device.type == "cuda")
        self._tables[request, len(held) : len(held) + len(new)].copy_(pinned, non_blocking=True)
        held.extend(new)


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)
