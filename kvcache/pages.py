"""Pages of 16 tokens: who owns which."""

from __future__ import annotations

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
    """One request's block table.

    Attributes:
        request: row of the request in the cache.
        table: ``[n]`` int64 page ids; logical page i holds positions 16 i to 16 i + 15.
    """

    request: int
    table: Tensor

    def slots(self, positions: Tensor) -> Tensor:
        """Physical slots ``page * 16 + offset`` of positions ``[R]``, int64."""
        page = torch.div(positions, PAGE_TOKENS, rounding_mode="floor")
        return self.table[page] * PAGE_TOKENS + positions % PAGE_TOKENS

    def upto(self, length: int) -> RequestPages:
        """The part of the table that holds the first ``length`` tokens."""
        return RequestPages(self.request, self.table[: -(-length // PAGE_TOKENS)])
