"""Local memory of threads, where registers are spilled to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .global_memory import load_marks, store_marks

Array = NDArray[Any]

TRACED_BASE = 2**62  # of the addresses of a trace


class LocalMemory:
    """Bytes of all threads, one thread after the other."""

    def __init__(self, threads: int, size: int) -> None:
        self.size = size
        self._words = np.zeros(threads * size // 4, np.uint32)
        self._undefined = np.full(threads * size // 4, 0xFFFFFFFF, np.uint32)

    def restart(self) -> None:
        """Begin again with other threads: nothing has been written."""
        self._undefined[:] = 0xFFFFFFFF

    def places(
        self, addresses: Array, threads: Array, size: int, fail: Callable[[Array, str], Exception]
    ) -> Array:
        """Offsets into the bytes of all threads."""
        wrong = (addresses < 0) | (addresses + size > self.size) | (addresses % size != 0)
        if wrong.any():
            raise fail(wrong, f"local address {int(addresses[wrong][0]):#x}, of {self.size:#x}")
        return threads * self.size + addresses

    def load(self, offsets: Array, size: int) -> tuple[list[Array], list[Array] | None]:
        """uint32 per register of the access, and undefined bits."""
        if size >= 4:
            values = [self._words[(offsets >> 2) + word] for word in range(size // 4)]
        else:
            data = self._words.view(np.uint8 if size == 1 else np.uint16)
            values = [data[offsets >> (size // 2)].astype(np.uint32)]
        return values, load_marks(self._undefined, offsets, size)

    def store(self, offsets: Array, size: int, values: list[Array], undefined: list[Array] | None) -> None:
        """Write uint32 per register of the access."""
        if size >= 4:
            for word, value in enumerate(values):
                self._words[(offsets >> 2) + word] = value
        else:
            kind = np.uint8 if size == 1 else np.uint16
            self._words.view(kind)[offsets >> (size // 2)] = values[0].astype(kind)
        store_marks(self._undefined, offsets, size, undefined)
