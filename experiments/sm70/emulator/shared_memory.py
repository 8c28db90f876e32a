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

    def restart(self) -> None:
        """Begin again with other blocks: nothing has been written."""
        self._data[:] = 0
        self._undefined[:] = 0xFFFFFFFF
        self.barrier(None)

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
            units = self._units(offsets, size)
            seen = self._seen(self._writers, units)
            conflict = self._from_others(seen, warps)
            if conflict is not None:
                conflict &= ~_any(seen & self._own[warps][:, None])
                if conflict.any():
                    self._report(report, "read after write", conflict, seen)
            self._readers[units, warps[:, None]] = 255
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
        units = self._units(offsets, size)
        seen = self._seen(self._readers, units)
        conflict = self._from_others(seen, warps)
        if conflict is not None:
            self._report(report, "write after read", conflict, seen)
        seen = self._seen(self._writers, units)
        conflict = self._from_others(seen, warps)
        if conflict is not None:
            conflict &= self._differ(before, values, size)
            if conflict.any():
                self._report(report, "write after write", conflict, seen)

    def _check_stored(
        self, offsets: Array, size: int, values: list[Array], warps: Array, report: Report
    ) -> None:
        """Against writes of other warps by the same instruction, which executed it at the same time."""
        units = self._units(offsets, size)
        self._writers[units, warps[:, None]] = 255
        lost = self._differ(self._load(offsets, size), values, size)
        if not lost.any():
            return
        seen = self._seen(self._writers, units)
        conflict = self._from_others(seen, warps)
        if conflict is not None and (conflict & lost).any():
            self._report(report, "write after write", conflict & lost, seen)

    def _units(self, offsets: Array, size: int) -> Array:
        """``[n, units]`` indices of what races are told apart by."""
        return (offsets // self._unit)[:, None] + np.arange(max(size // self._unit, 1))

    def _seen(self, marks: Array, units: Array) -> Array:
        """``[n, units, groups]`` uint64, a byte per warp."""
        return marks.view(np.uint64)[units]

    def _from_others(self, seen: Array, warps: Array) -> Array | None:
        """``[n, units]`` bool, marks of other warps than one's own; None where there are none."""
        others = seen & self._others[warps][:, None]
        return _any(others) if others.any() else None

    def _differ(self, stored: list[Array], values: list[Array], size: int) -> Array:
        """``[n, units]`` bool, where values are not those that are stored."""
        kept = np.uint32(0xFFFFFFFF if size >= 4 else (1 << 8 * size) - 1)
        words = np.stack([(a ^ b) & kept != 0 for a, b in zip(stored, values, strict=True)], 1)
        return np.repeat(words, max(size // self._unit, 1) // words.shape[1], 1)

    def _report(self, report: Report, kind: str, conflict: Array, seen: Array) -> None:
        """Report accesses by their first unit at fault."""
        unit = conflict.argmax(1)
        marks = np.ascontiguousarray(seen[np.arange(len(seen)), unit]).view(np.uint8)
        report(kind, np.asarray(conflict.any(1)), marks[:, : self._warps] != 0)

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
    return np.asarray((marks != 0).any(-1))
