"""Writes down what the warps of some blocks do, and makes a trace of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.trace import SECTOR_BYTES, Trace

from .local_memory import TRACED_BASE
from .memory import Access
from .threads import WARP, Threads

Array = NDArray[Any]

_BANKS = 32
_NOTHING = np.int64(2**63 - 1)  # sorts behind every sector


class Recorder:
    """Events of all warps of some blocks, in the order in which they were executed."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._every_warp = np.arange(threads.count // WARP)
        self._instructions: list[int] = []
        self._warps: list[Array] = []
        self._lanes: list[Array] = []
        self._sector_events: list[Array] = []
        self._sectors: list[Array] = []
        self._wavefronts: list[tuple[int, Array]] = []  # first event, per warp of the event
        self._events = 0

    def record(
        self, instruction: int, group: Array | None, effective: Array | None, access: Access | None
    ) -> None:
        """Warps with threads in ``group`` issued an instruction, which had an effect for ``effective``."""
        warps = self._every_warp if group is None else np.flatnonzero(group.reshape(-1, WARP).any(1))
        self._instructions.append(instruction)
        self._warps.append(warps)
        if effective is None:
            lanes = np.full(len(warps), WARP, np.uint8)
        else:
            lanes = effective.reshape(-1, WARP).sum(1).astype(np.uint8)[warps]
        self._lanes.append(lanes)
        if access:
            self._record_access(access, warps)
        self._events += len(warps)

    def _record_access(self, access: Access, warps: Array) -> None:
        addresses = np.full(self._threads.count, -1, np.int64)
        addresses[slice(None) if access.threads is None else access.threads] = access.addresses
        if access.space == "shared":
            found = wavefronts(addresses.reshape(-1, WARP)[warps], access.size)
            self._wavefronts.append((self._events, found))
            return
        if access.space == "local":
            addresses = self._local(addresses)
        rows = addresses.reshape(-1, WARP)[warps]
        sectors = np.where(rows < 0, _NOTHING, rows // SECTOR_BYTES)
        if access.space == "local" and access.size > 4:  # the words of a thread lie in rows of a warp's
            further = [
                np.where(rows < 0, _NOTHING, (rows + 4 * WARP * k) // SECTOR_BYTES)
                for k in range(1, access.size // 4)
            ]
            sectors = np.concatenate([sectors, *further], 1)
        sectors.sort(1)
        new = np.ones(sectors.shape, bool)
        new[:, 1:] = sectors[:, 1:] != sectors[:, :-1]
        new &= sectors != _NOTHING
        self._sector_events.append(self._events + np.nonzero(new)[0])
        self._sectors.append(sectors[new])

    def _local(self, addresses: Array) -> Array:
        """Word w of a warp's threads is a row of 128 bytes."""
        warp = np.arange(self._threads.count) // WARP
        place = self._threads.blocks[self._threads.block].astype(np.int64)
        number = (place[:, 0] + (place[:, 1] << 16) + (place[:, 2] << 24)) * self._threads.warps
        number = number + warp % self._threads.warps
        row = TRACED_BASE + (number << 22) + addresses // 4 * 4 * WARP + self._threads.lane * 4
        return np.where(addresses < 0, -1, row)

    def trace(self) -> Trace:
        """All events, by warp."""
        counts = [len(warps) for warps in self._warps]
        instructions = np.repeat(np.array(self._instructions, np.int32), counts)
        warps = _joined(self._warps, np.int64)
        lanes = _joined(self._lanes, np.uint8)
        waves = np.zeros(self._events, np.uint8)
        for first, found in self._wavefronts:
            waves[first : first + len(found)] = found
        order = np.argsort(warps, kind="stable")
        starts = np.searchsorted(warps[order], np.arange(self._threads.count // WARP + 1))
        events, sectors = _joined(self._sector_events, np.int64), _joined(self._sectors, np.int64)
        rank = np.empty(self._events, np.int64)
        rank[order] = np.arange(self._events)
        by_event = np.argsort(rank[events], kind="stable")
        sector_starts = np.searchsorted(rank[events][by_event], np.arange(self._events + 1))
        return Trace(
            self._threads.warps, self._threads.blocks, starts, instructions[order], lanes[order],
            sector_starts, sectors[by_event], waves[order],
        )  # fmt: skip


def _joined(parts: Sequence[Array], kind: type) -> Array:
    return np.concatenate(parts).astype(kind) if parts else np.zeros(0, kind)


def wavefronts(addresses: Array, size: int) -> Array:
    """``[warps]`` uint8, passes through shared memory for ``[warps, 32]`` addresses, -1 where there is none.

    32 banks give a word of 4 bytes each; threads that want the same word share it. 8 bytes a thread are
    served to 16 threads at once, 16 bytes to 8.
    """
    words = max(size // 4, 1)
    groups = addresses.reshape(len(addresses) * words, WARP // words)
    wanted = (groups[:, :, None] + 4 * np.arange(words)).reshape(len(groups), -1) // 4
    wanted = np.where(np.repeat(groups < 0, words, 1), _NOTHING, wanted)
    wanted.sort(1)
    new = np.ones(wanted.shape, bool)
    new[:, 1:] = wanted[:, 1:] != wanted[:, :-1]
    new &= wanted != _NOTHING
    row = np.nonzero(new)[0]
    load = np.bincount(row * _BANKS + wanted[new] % _BANKS, minlength=len(groups) * _BANKS)
    passes = load.reshape(len(groups), _BANKS).max(1)
    return passes.reshape(-1, words).sum(1).astype(np.uint8)


def joined(traces: Sequence[Trace]) -> Trace:
    """The traces of several sets of blocks as one."""
    if len(traces) == 1:
        return traces[0]

    def starts(parts: list[Array]) -> Array:
        ends = np.cumsum([0] + [part[-1] for part in parts])
        moved = [part[:-1] + end for part, end in zip(parts, ends[:-1], strict=True)]
        return np.concatenate([*moved, ends[-1:]])

    return Trace(
        traces[0].warps_per_block,
        np.concatenate([t.blocks for t in traces]),
        starts([t.warp_starts for t in traces]),
        np.concatenate([t.instructions for t in traces]),
        np.concatenate([t.lanes for t in traces]),
        starts([t.sector_starts for t in traces]),
        np.concatenate([t.sectors for t in traces]),
        np.concatenate([t.wavefronts for t in traces]),
    )
