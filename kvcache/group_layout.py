"""A group: the pages of some adjacent positions of a prompt and the state after them, as one run of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import HybridCache

_ALIGNMENT = 16


@dataclass(frozen=True)
class _Part:
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class GroupLayout:
    """Where the parts of a group lie in its bytes: each paged tensor's rows together, then the state.

    Args:
        cache: gives shapes and dtypes, by layer and format.
        pages: of the group.
    """

    def __init__(self, cache: HybridCache, pages: int) -> None:
        offset = 0

        def part(shape: tuple[int, ...], dtype: torch.dtype) -> _Part:
            nonlocal offset
            made = _Part(offset, shape, dtype)
            offset += -(-made.nbytes // _ALIGNMENT) * _ALIGNMENT
            return made

        self._paged = [part((pages, *t.shape[1:]), t.dtype) for t in cache.paged_tensors()]
        self.state_offset = offset
        """Bytes of the pages; the state begins there."""
        self._state = [part(tuple(t.shape), t.dtype) for t in cache.prefilled_state(0)]
        self.nbytes = offset

    def pages(self, buffer: Tensor) -> list[Tensor]:
        """The pages in a group's bytes (uint8 ``[nbytes]``): views ``[pages, ...]``, one a paged tensor."""
        return [part.view(buffer) for part in self._paged]

    def state(self, buffer: Tensor) -> list[Tensor]:
        """The state in a group's bytes, as views in the order of ``HybridCache.prefilled_state``."""
        return [part.view(buffer) for part in self._state]
