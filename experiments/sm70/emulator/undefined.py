"""Which registers hold values that nobody wrote.

Compilers compute with such values where the result does not matter, behind a predicate of its own for
example. So reading one is no error. It makes the result undefined, byte by byte where the instruction moves
bytes, and becomes an error where it decides something: an address, a branch, or what is stored in global
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PREDICATES = 256  # predicate p is place 256 + p
ALL_BYTES = 15  # bit i: byte i of the register is undefined
_BYTE_MASKS = np.array([0x000000FF, 0x0000FF00, 0x00FF0000, 0xFF000000], np.uint32)


class Undefined:
    """Bytes of registers, and predicates, that are undefined.

    Attributes:
        bytes: ``[264, N]`` uint8, a bit per byte: registers, then predicates.
        anywhere: for each place whether any thread may have it undefined.
    """

    def __init__(self, threads: int) -> None:
        self.bytes = np.full((PREDICATES + 8, threads), ALL_BYTES, np.uint8)
        self.anywhere = [True] * (PREDICATES + 8)
        for always in (PREDICATES - 1, PREDICATES + 7):  # RZ and PT
            self.bytes[always] = 0
            self.anywhere[always] = False

    def of(self, sources: tuple[tuple[int, int], ...]) -> Array | None:
        """``[N]`` bool, whether any of ``(place, bytes)`` is undefined; None where none is in any thread."""
        found = None
        for place, which in sources:
            if self.anywhere[place]:
                one = self.bytes[place] & which
                found = one if found is None else found | one
        return None if found is None else found != 0

    def set(self, place: int, undefined: Array | None, mask: Array | None) -> None:
        """A result is undefined in bytes ``undefined`` ``[N]`` uint8, or nowhere, for threads of a mask."""
        if place in (PREDICATES - 1, PREDICATES + 7):
            return
        if undefined is None:
            if not self.anywhere[place]:
                return
            if mask is None:
                self.bytes[place] = 0
                self.anywhere[place] = False
                return
            self.bytes[place][mask] = 0
        else:
            np.copyto(self.bytes[place], undefined, where=True if mask is None else mask)
        self.anywhere[place] = bool(self.bytes[place].any())

    def forget(self, mask: Array) -> None:
        """Threads have exited: nothing of theirs matters."""
        self.bytes[:, mask] = 0


def bits_of(undefined_bytes: Array) -> Array:
    """Masks of bits for masks of bytes."""
    chosen = undefined_bytes[:, None] >> np.arange(4, dtype=np.uint8) & 1
    return (chosen * _BYTE_MASKS).sum(1, dtype=np.uint32)


def bytes_of(bits: Array) -> Array:
    """Masks of bytes for masks of bits: those with any bit."""
    touched = (bits[:, None] & _BYTE_MASKS) != 0
    return (touched << np.arange(4)).sum(1).astype(np.uint8)
