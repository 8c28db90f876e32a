"""Which registers hold values that nobody wrote.

Compilers compute with such values where the result does not matter, behind a predicate of its own for
example. So reading one is no error. It makes the result undefined, bit by bit where the instruction moves
bits, and becomes an error where it decides something: an address, a branch, or what is stored in global
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PREDICATES = 256  # predicate p is place 256 + p
ALL_BITS = np.uint32(0xFFFFFFFF)


class Undefined:
    """Bits of registers, and predicates, that are undefined.

    Attributes:
        bits: ``[264, N]`` uint32, ones where registers are undefined; then predicates, all ones or zeros.
        anywhere: for each place whether any thread may have it undefined.
    """

    def __init__(self, threads: int) -> None:
        self.bits = np.empty((PREDICATES + 8, threads), np.uint32)
        self.anywhere = [True] * (PREDICATES + 8)
        self.restart()

    def restart(self) -> None:
        """Nothing has been written."""
        self.bits[:] = ALL_BITS
        self.anywhere[:] = [True] * (PREDICATES + 8)
        for always in (PREDICATES - 1, PREDICATES + 7):  # RZ and PT
            self.bits[always] = 0
            self.anywhere[always] = False

    def of(self, sources: tuple[tuple[int, Any], ...]) -> Array | None:
        """``[N]`` bool, whether any of ``(place, bits)`` is undefined; None where none is in any thread."""
        found = None
        for place, which in sources:
            if self.anywhere[place]:
                one = self.bits[place] & which
                found = one if found is None else found | one
        return None if found is None else found != 0

    def set(self, place: int, undefined: Array | None, mask: Array | None) -> None:
        """A result is undefined in bits ``undefined`` ``[N]`` uint32, or nowhere, for threads of a mask."""
        if place in (PREDICATES - 1, PREDICATES + 7):
            return
        if undefined is None:
            if not self.anywhere[place]:
                return
            if mask is None:
                self.bits[place] = 0
                self.anywhere[place] = False
                return
            self.bits[place][mask] = 0
        else:
            np.copyto(self.bits[place], undefined, where=True if mask is None else mask)
        self.anywhere[place] = bool(self.bits[place].any())

    def forget(self, mask: Array) -> None:
        """Threads have exited: nothing of theirs matters."""
        self.bits[:, mask] = 0
