"""Pages of 16 tokens: who owns which."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError

PAGE_TOKENS = 16


class PageAllocator:
    """Hands out page ids; every page has one owner and is freed once.

    A page id means the same tokens in every layer: all layers share the block tables.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._owned: set[int] = set()

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` pages.

        Raises:
            InputError: fewer are free.
        """
        if count > len(self._free):
            raise InputError(
                f"the KV cache has {len(self._free)} of {self.total} pages free, {count} more are needed: "
                f"raise max_tokens (now {self.total * PAGE_TOKENS})"
            )
        pages = [self._free.pop() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Gives pages back; giving one back twice, or one never taken, is an error of the program."""
        for page in pages:
            if page not in self._owned:
                raise RuntimeError(f"page {page} is freed but not owned: double free or foreign page")
            self._owned.remove(page)
            self._free.append(page)

    def check(self, tables: list[list[int]]) -> None:
        """Accounting: the tables hold every owned page exactly once, and the rest is free."""
        held = [page for table in tables for page in table]
        if len(held) != len(set(held)):
            raise RuntimeError("a page stands in two block tables")
        if set(held) != self._owned or len(held) + len(self._free) != self.total:
            raise RuntimeError(f"{len(self._owned)} pages owned, {len(held)} in block tables: pages leaked")


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
        self.allocator = PageAllocator(pages)
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
        more = pages_for(length) - len(pages)
        if more <= 0:
            return
        if len(pages) + more > self._tables.shape[1]:
            raise InputError(
                f"{length} tokens are more than one request may hold, {self._tables.shape[1] * PAGE_TOKENS}"
            )
        new = self.allocator.allocate(more)
        pinned = torch.tensor(new, pin_memory=self.device.type == "cuda")
        self._tables[request, len(pages) : len(pages) + more].copy_(pinned, non_blocking=True)
        pages.extend(new)

    def close(self, request: int) -> None:
        """Frees the request's pages and its row."""
        self.allocator.release(self._pages.pop(request))
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
        """The pages a request owns, in the order of its tokens."""
        return list(self._pages[request])

    def check(self) -> None:
        """Raises RuntimeError on a leaked, shared or doubly freed page."""
        self.allocator.check(list(self._pages.values()))


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)
