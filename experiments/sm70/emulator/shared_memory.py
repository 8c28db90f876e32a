"""Shared memory of some blocks, and what happens to it between two barriers.

Between two barriers the warps of a block run in any order. So no warp may read what another one has written
since the last barrier, nor write where another one has read, or has written anything else. A warp may read
what it wrote itself, also where another one wrote the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .global_memory import load_marks, store_marks

Array = NDArray[Any]
Report = Callable[[str, Array, Array], None]

_GROUP = 8  # warps whose marks are one uint64


class SharedMemory:
    """Bytes of all blocks, one block after the other.

    Attributes:
        size: bytes of a block.
    """

    def __init__(self, blocks: int, size: int, warps: int, *, by_byte: bool, check_races: bool) -> None:
        """``by_byte`` tells races apart byte by byte rather than word by word."""
        self.size, self._blocks, self._warps = size, blocks, warps
        self._stride = -(-max(size, 4) // 16) * 16
        self._data = np.zeros(blocks * self._stride, np.uint8)
        self._words = self._data.view(np.uint32)
        self._halves = self._data.view(np.uint16)
        self._undefined = np.full(blocks * self._stride // 4, 0xFFFFFFFF, np.uint32)
        self._unit = 1 if by_byte else 4
        self._check = check_races and warps > 1
        groups = -(-warps // _GROUP)
        units = blocks * self._stride // self._unit if self._check else 0
        self._readers = np.zeros((units, groups * _GROUP), np.uint8)
        self._writers = np.zeros((units, groups * _GROUP), np.uint8)
        own = np.eye(groups * _GROUP, dtype=np.uint8) * np.uint8(255)
        self._others = ~own.view(np.uint64)  # [warps, groups], everyone but oneself
        self._own = own.view(np.uint64)
        self._touched = False

    def places(
        self, addresses: Array, blocks: Array, size: int, fail: Callable[[Array, str], Exception]
    ) -> Array:
        """Offsets into the bytes of all blocks."""
        wrong = (addresses < 0) | (addresses + size > self.size)
        if wrong.any():
            raise fail(
                wrong,
                f"shared address {int(addresses[wrong][0]):#x} + {size} is behind the end, {self.size:#x}",
            )
        if size > 1 and (addresses & (size - 1)).any():
            wrong = addresses & (size - 1) != 0
            raise fail(wrong, f"shared address {int(addresses[wrong][0]):#x} is not a multiple of {size}")
        return addresses + blocks * self._stride

    def load(
        self, offsets: Array, size: int, warps: Array, report: Report
    ) -> tuple[list[Array], list[Array] | None]:
        """uint32 per register of the access, and undefined bits."""
        if self._check:
            self._touched = True
            writers = self._writers.view(np.uint64)
            for unit in self._units(offsets, size):
                seen = writers[unit]
                conflict = _any(seen & self._others[warps]) & ~_any(seen & self._own[warps])
                if conflict.any():
                    report("read after write", conflict, self._who(seen))
                self._readers[unit, warps] = 255
        return self._load(offsets, size), load_marks(self._undefined, offsets, size)

    def _load(self, offsets: Array, size: int) -> list[Array]:
        if size >= 4:
            first = offsets >> 2
            return [self._words[first + word] for word in range(size // 4)]
        data = self._data if size == 1 else self._halves
        return [data[offsets >> (size // 2)].astype(np.uint32)]

    def store(
        self,
        offsets: Array,
        size: int,
        values: list[Array],
        undefined: list[Array] | None,
        warps: Array,
        report: Report,
    ) -> None:
        """Write uint32 per register of the access."""
        if self._check:
            self._touched = True
            before = self._load(offsets, size)
            self._check_store(offsets, size, values, before, warps, report)
        if size >= 4:
            first = offsets >> 2
            for word, value in enumerate(values):
                self._words[first + word] = value
        elif size == 2:
            self._halves[offsets >> 1] = values[0].astype(np.uint16)
        else:
            self._data[offsets] = values[0].astype(np.uint8)
        store_marks(self._undefined, offsets, size, undefined)
        if self._check:
            self._check_stored(offsets, size, values, warps, report)

    def _check_store(
        self,
        offsets: Array,
        size: int,
        values: list[Array],
        before: list[Array],
        warps: Array,
        report: Report,
    ) -> None:
        """Against accesses of earlier instructions."""
        readers, writers = self._readers.view(np.uint64), self._writers.view(np.uint64)
        kept = _mask(size)
        for index, unit in enumerate(self._units(offsets, size)):
            seen = readers[unit]
            conflict = _any(seen & self._others[warps])
            if conflict.any():
                report("write after read", conflict, self._who(seen))
            seen = writers[unit]
            conflict = _any(seen & self._others[warps])
            if conflict.any():
                word = index * self._unit // 4
                conflict &= (before[word] ^ values[word]) & kept != 0
                if conflict.any():
                    report("write after write", conflict, self._who(seen))

    def _check_stored(
        self, offsets: Array, size: int, values: list[Array], warps: Array, report: Report
    ) -> None:
        """Against writes of other warps by the same instruction, which executed it at the same time."""
        kept = _mask(size)
        lost = [
            (now ^ value) & kept != 0 for now, value in zip(self._load(offsets, size), values, strict=True)
        ]
        for unit in self._units(offsets, size):
            self._writers[unit, warps] = 255
        if not any(one.any() for one in lost):
            return
        writers = self._writers.view(np.uint64)
        for index, unit in enumerate(self._units(offsets, size)):
            seen = writers[unit]
            conflict = lost[index * self._unit // 4] & _any(seen & self._others[warps])
            if conflict.any():
                report("write after write", conflict, self._who(seen))

    def _units(self, offsets: Array, size: int) -> list[Array]:
        """Indices of what races are told apart by, per unit of the access."""
        first = offsets // self._unit
        return [first + unit for unit in range(max(size // self._unit, 1))]

    def _who(self, seen: Array) -> Array:
        """``[n, warps]`` bool."""
        return np.ascontiguousarray(seen).view(np.uint8)[:, : self._warps] != 0

    def barrier(self, blocks: Array | None) -> None:
        """All warps of these blocks have met."""
        if not self._check or not self._touched:
            return
        if blocks is None:
            self._readers[:] = 0
            self._writers[:] = 0
            self._touched = False
            return
        for marks in (self._readers, self._writers):
            marks.reshape(self._blocks, -1)[blocks] = 0


def _any(marks: Array) -> Array:
    return np.asarray((marks != 0).any(1))


def _mask(size: int) -> Any:
    return np.uint32(0xFFFFFFFF if size >= 4 else (1 << 8 * size) - 1)
