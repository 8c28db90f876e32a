"""Shared memory of a block for :mod:`tests.kernels.ptx_emulator`, which finds what a barrier is missing for.

Between two barriers warps run in any order. So no warp may read what another one has written since the last
barrier, nor write where another one has read, or has written anything else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class SharedMemory:
    """Bytes, and which warps have touched them since the last barrier."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)  # NaN, unless it is written first
        self.unfenced = np.zeros(size, bool)  # written since the last fence.proxy.async
        self._readers = np.zeros(size, np.uint32)  # a bit per warp
        self._writers = np.zeros(size, np.uint32)

    def places(self, addresses: Array, size: int) -> Array:
        """Indices ``[n, size]`` of aligned accesses at ``[n]``."""
        assert (addresses % size == 0).all(), "misaligned"
        assert (addresses + size <= len(self.bytes)).all(), "outside of shared memory"
        return addresses[:, None] + np.arange(size)

    def load(self, places: Array, warps: Array) -> Array:
        """Bytes at places ``[n, size]`` that warps ``[n]`` read."""
        for warp in np.unique(warps):
            bit, own = np.uint32(1 << warp), places[warps == warp]
            writers = self._writers[own]
            assert ((writers == 0) | (writers & bit != 0)).all(), "no barrier since another warp wrote this"
            self._readers[own] |= bit
        return self.bytes[places]

    def store(self, places: Array, data: Array, warps: Array) -> None:
        """Write bytes ``[n, size]`` at places of warps ``[n]``."""
        self.will_store(places, warps)
        for warp in np.unique(warps):
            bit, here = np.uint32(1 << warp), warps == warp
            own, values = places[here], data[here]
            same = self.bytes[own] == values
            assert (same | (self._writers[own] & ~bit == 0)).all(), "no barrier since another warp wrote here"
            self.bytes[own] = values
            self._writers[own] |= bit
        self.unfenced[places] = True

    def will_store(self, places: Array, warps: Array) -> None:
        """Check that warps ``[n]`` may write here from now on."""
        for warp in np.unique(warps):
            readers = self._readers[places[warps == warp]]
            assert (readers & ~np.uint32(1 << warp) == 0).all(), "no barrier since another warp read this"

    def barrier(self) -> None:
        """All warps have met."""
        self._readers[:] = 0
        self._writers[:] = 0
