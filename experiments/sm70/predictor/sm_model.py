"""Replays a launch's instructions through the schedulers, pipes and memory of a V100, cycle by cycle.

The compiler's control codes drive it: an instruction issues when its warp's stall is over and the barriers in
its wait mask are clear. Everything that two instructions compete for is a time from which it is free.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from page4.experiments.sm70.predictor.caches import (
    LINE_SECTORS,
    SECTOR_BYTES,
    Lines,
    age_lines,
    dirty_cache,
    empty_caches,
    find_line,
    replace_line,
    set_of,
)
from page4.experiments.sm70.predictor.launch import Records, Traces
from page4.experiments.sm70.predictor.machine import Machine
from page4.experiments.sm70.predictor.pipes import Kind, Pipe

_L1_WAYS, _L2_WAYS = 8, 16
_CARVE_OUTS = (0, 8, 16, 32, 64, 96)  # KiB of shared memory that a multiprocessor can be set to
_NEVER = np.iinfo(np.int64).max
_SCHEDULERS = 4
_BARRIERS = 6

_SPECIAL, _TENSOR, _LSU = int(Pipe.SPECIAL), int(Pipe.TENSOR), int(Pipe.LSU)
_LOAD, _STORE, _SHARED = int(Kind.GLOBAL_LOAD), int(Kind.GLOBAL_STORE), int(Kind.SHARED)
_BARRIER, _BRANCH, _SYSTEM = int(Kind.BARRIER), int(Kind.BRANCH), int(Kind.SYSTEM)

# Counters of a replay.
_END, _ISSUED, _L1_HITS, _L1_MISSES, _L2_SECTORS, _READ, _WRITTEN, _WAVEFRONTS, _BUSY = range(9)
_L2, _DRAM = 0, 1  # cycles, with fractions, from which each is free


# A place for a warp; place w of a multiprocessor belongs to scheduler w % 4.
_WARP = np.dtype(
    [
        ("at", "i8"),  # its next event
        ("end", "i8"),
        ("block", "i8"),  # that it belongs to; -1: the place is empty or its warp has ended
        ("ready", "i8"),  # cycle from which the next instruction may issue
        ("waits", "i8"),  # 1: at a barrier of the block
        ("age", "i8"),
        ("barriers", "i8", (_BARRIERS,)),  # cycle at which each clears
    ]
)
_SCHEDULER = np.dtype(
    [
        ("wake", "i8"),  # cycle at which it must look again
        ("last", "i8"),  # place that it stays with, or -1
        ("free", "i8", (len(Pipe),)),  # cycle from which a pipe is free
    ]
)
_UNIT = np.dtype(
    [
        ("queue", "i8"),  # cycle at which the load/store unit has done all that it accepted
        ("port", "i8"),  # likewise, of the way back from L2
    ]
)


class Replay(NamedTuple):
    """What a replay counted.

    Attributes:
        cycles: from the first instruction to the last result.
        issued: warp instructions.
        busy: share of the cycles for which each pipe of :class:`Pipe` was taken, on average; of the
            load/store unit, its 128-byte path.
        l1_hits: share of sectors.
        l2_bytes: that passed L2.
        read_bytes, written_bytes: of DRAM. Lines that are dirty at the end are not written.
    """

    cycles: int
    issued: int
    busy: tuple[float, ...]
    l1_hits: float
    l2_bytes: int
    read_bytes: int
    written_bytes: int


def replay(
    machine: Machine,
    code: Records,
    traces: Traces,
    blocks: Records,
    warps: int,
    resident: int,
    shared_bytes: int,
    l2: Lines | None = None,
) -> Replay:
    """Run the blocks on an otherwise idle machine.

    Args:
        machine: the GPU.
        code: its program.
        traces: of some blocks.
        blocks: all blocks of the launch.
        warps: of a block.
        resident: blocks that a multiprocessor holds.
        shared_bytes: of a block; L1 is what all of them leave.
        l2: what L2 holds, changed in place to what it holds afterwards; by default another kernel's dirty
            lines, see :func:`usual_l2`.
    """
    counters = np.zeros(_BUSY + len(Pipe), np.int64)
    state, schedulers, units = _idle(machine.multiprocessors, warps * resident)
    memory = np.zeros(2)
    l1 = empty_caches(machine.multiprocessors, _l1_bytes(machine, resident * shared_bytes), _L1_WAYS)
    if l2 is None:
        l2 = usual_l2(machine)
    _run(
        machine, code, *traces, blocks, state, schedulers, units, memory, l1, l2, counters, warps, resident
    )  # fmt: skip
    cycles = int(counters[_END])
    age_lines(l2, cycles)
    available = cycles * machine.multiprocessors
    busy = [int(counters[_BUSY + pipe]) / (available * _SCHEDULERS) for pipe in Pipe]
    busy[Pipe.LSU] = int(counters[_WAVEFRONTS]) / available
    asked = int(counters[_L1_HITS] + counters[_L1_MISSES])
    return Replay(
        cycles=cycles,
        issued=int(counters[_ISSUED]),
        busy=tuple(busy),
        l1_hits=int(counters[_L1_HITS]) / max(1, asked),
        l2_bytes=int(counters[_L2_SECTORS]) * SECTOR_BYTES,
        read_bytes=int(counters[_READ]) * SECTOR_BYTES,
        written_bytes=int(counters[_WRITTEN]) * SECTOR_BYTES,
    )


def usual_l2(machine: Machine) -> Lines:
    """L2 as a step finds it: full of lines that other kernels wrote."""
    return dirty_cache(machine.l2_bytes, _L2_WAYS)


def _l1_bytes(machine: Machine, shared_bytes: int) -> int:
    carved = next(
        (size * 1024 for size in _CARVE_OUTS if size * 1024 >= shared_bytes), _CARVE_OUTS[-1] * 1024
    )
    return machine.unified_bytes - carved


def _idle(multiprocessors: int, places: int) -> tuple[Records, Records, Records]:
    """Places for warps, schedulers and load/store units that have nothing to do."""
    state = np.zeros((multiprocessors, places), _WARP)
    state["block"] = -1
    schedulers = np.zeros((multiprocessors, _SCHEDULERS), _SCHEDULER)
    schedulers["wake"] = _NEVER
    schedulers["last"] = -1
    return state, schedulers, np.zeros(multiprocessors, _UNIT)


@numba.njit(cache=True)
def _run(
    machine, code, warp_start, events, sectors, blocks, state, schedulers, units, memory, l1, l2, counters,
    warps, resident,
):  # fmt: skip
    multiprocessors, count = machine.multiprocessors, blocks.shape[0]
    started = 0
    for slot in range(resident):
        for sm in range(multiprocessors):
            if started < count:
                _start_block(warp_start, blocks, state, schedulers, started, sm, slot, warps, 0)
                started += 1
    left = count
    now = 0
    while left > 0:
        next_time = _NEVER
        for sm in range(multiprocessors):
            for s in range(_SCHEDULERS):
                if schedulers[sm, s].wake <= now:
                    place, wake = _choose(machine, code, events, state, schedulers, units, sm, s, now)
                    schedulers[sm, s].wake = wake
                    if place >= 0:
                        kind = _issue(
                            machine, code, events, sectors, blocks, state, schedulers, units, memory, l1, l2,
                            counters, sm, s, place, now,
                        )  # fmt: skip
                        if kind == _BARRIER or state[sm, place].block < 0:
                            slot = place // warps
                            if _meet(machine, state, schedulers, sm, slot, warps, now):
                                left -= 1
                                if started < count:
                                    ready = now + machine.block_start_cycles
                                    _start_block(
                                        warp_start, blocks, state, schedulers, started, sm, slot, warps, ready
                                    )
                                    started += 1
                next_time = min(next_time, schedulers[sm, s].wake)
        if next_time == _NEVER and left > 0:
            raise RuntimeError("no warp can go on: a barrier waits for a warp that never arrives")
        now = max(now + 1, next_time)


@numba.njit(cache=True)
def _start_block(warp_start, blocks, state, schedulers, block, sm, slot, warps, ready):
    for index in range(warps):
        place = slot * warps + index
        trace = blocks[block].trace * warps + index
        warp = state[sm, place]
        warp.at = warp_start[trace]
        warp.end = warp_start[trace + 1]
        warp.block = block
        warp.ready = ready
        warp.waits = 0
        warp.age = block * warps + index
        for barrier in range(_BARRIERS):
            warp.barriers[barrier] = 0
        scheduler = schedulers[sm, place % _SCHEDULERS]
        scheduler.wake = min(scheduler.wake, ready)


@numba.njit(cache=True)
def _choose(machine, code, events, state, schedulers, units, sm, s, now):
    """The place whose warp issues now, or -1, and the cycle at which to look again.

    The scheduler stays with its last warp while that asks for it, else takes the oldest that can issue.
    """
    scheduler = schedulers[sm, s]
    best, best_age, wake = -1, _NEVER, _NEVER
    for place in range(s, state.shape[1], _SCHEDULERS):
        warp = state[sm, place]
        if warp.block < 0 or warp.waits:
            continue
        ready = warp.ready
        if ready <= now:
            instruction = code[events[warp.at].instruction]
            mask = instruction.wait_mask
            barrier = 0
            while mask:
                if mask & 1:
                    ready = max(ready, warp.barriers[barrier])
                mask >>= 1
                barrier += 1
            pipe = instruction.pipe
            ready = max(ready, scheduler.free[pipe])
            if pipe == _LSU:
                ready = max(ready, units[sm].queue - machine.queue_cycles)
        if ready > now:
            wake = min(wake, ready)
            continue
        age = -1 if place == scheduler.last else warp.age
        if age < best_age:
            best, best_age = place, age
    return best, (now + 1 if best >= 0 else wake)


@numba.njit(cache=True)
def _issue(
    machine, code, events, sectors, blocks, state, schedulers, units, memory, l1, l2, counters,
    sm, s, place, now,
):  # fmt: skip
    """Issue the next instruction of a warp, and say of what kind it is."""
    warp, scheduler = state[sm, place], schedulers[sm, s]
    at = warp.at
    index = events[at].instruction
    instruction = code[index]
    pipe, kind = instruction.pipe, instruction.kind
    counters[_ISSUED] += 1
    counters[_BUSY + pipe] += instruction.cycles
    scheduler.last = place if instruction.keeps else -1
    scheduler.free[pipe] = now + instruction.cycles
    result = read = now + machine.fixed_latency
    if pipe == _LSU:
        result, read = _access(
            machine, events, sectors, blocks[warp.block], scheduler, units, memory, l1, l2, counters,
            sm, at, kind, now,
        )  # fmt: skip
    elif pipe == _SPECIAL:
        result = now + machine.special_latency
    elif pipe == _TENSOR:
        result = now + machine.tensor_latency
    elif kind == _SYSTEM:
        result = now + machine.system_latency
    elif instruction.write_barrier < _BARRIERS:
        result = now + machine.variable_latency
    if instruction.write_barrier < _BARRIERS:
        barrier = instruction.write_barrier
        warp.barriers[barrier] = max(warp.barriers[barrier], result)
    if instruction.read_barrier < _BARRIERS:
        barrier = instruction.read_barrier
        warp.barriers[barrier] = max(warp.barriers[barrier], read)
    counters[_END] = max(counters[_END], result)
    warp.ready = now + max(1, instruction.stall)
    warp.at = at + 1
    if at + 1 == warp.end:
        warp.block = -1
    elif kind == _BARRIER:
        warp.waits = 1
    elif kind == _BRANCH and events[at + 1].instruction != index + 1:
        warp.ready += machine.branch_cycles
    return kind


@numba.njit(cache=True)
def _meet(machine, state, schedulers, sm, slot, warps, now):
    """Let a block's warps go on when all that live have arrived. Returns whether none lives."""
    alive = arrived = 0
    for place in range(slot * warps, (slot + 1) * warps):
        if state[sm, place].block >= 0:
            alive += 1
            arrived += state[sm, place].waits
    if alive > 0 and alive == arrived:
        for place in range(slot * warps, (slot + 1) * warps):
            warp = state[sm, place]
            if warp.block >= 0:
                warp.waits = 0
                warp.ready = max(warp.ready, now + machine.barrier_cycles)
                scheduler = schedulers[sm, place % _SCHEDULERS]
                scheduler.wake = min(scheduler.wake, warp.ready)
    return alive == 0


@numba.njit(cache=True)
def _access(
    machine, events, sectors, block, scheduler, units, memory, l1, l2, counters, sm, at, kind, now
):  # fmt: skip
    """Send an access through the load/store unit: when its result is there, and its operands are read."""
    unit, wavefronts = units[sm], events[at].wavefronts
    start = max(now + 2, unit.queue)
    unit.queue = start + wavefronts
    counters[_WAVEFRONTS] += wavefronts
    read = start + wavefronts + 4
    if kind == _SHARED:
        return start + wavefronts - 1 + machine.shared_latency, read
    result = start + machine.l1_latency if kind == _LOAD else now + machine.fixed_latency
    first = events[at].first_sector
    for k in range(first, events[at + 1].first_sector):
        touched = sectors[k]
        sector = touched.address + block.x * touched.step_x + block.y * touched.step_y
        if kind == _LOAD:
            ready = _load_sector(machine, unit, memory, l1, l2, counters, sm, sector, start, (k - first) & 1)
            result = max(result, ready)
        else:
            _store_sector(machine, memory, l2, counters, sector, start)
    if kind == _STORE and memory[_DRAM] - now > machine.store_backlog_cycles:
        scheduler.free[_LSU] = int(memory[_DRAM]) - machine.store_backlog_cycles
    return result, read


@numba.njit(cache=True)
def _load_sector(machine, unit, memory, l1, l2, counters, sm, sector, start, odd):
    """The cycle at which a sector that is asked for at ``start`` is in L1."""
    line, part = sector // LINE_SECTORS, sector % LINE_SECTORS
    place = set_of(l1, line)
    way = find_line(l1, sm, place, line)
    if way < 0:
        way, _ = replace_line(l1, sm, place, line)
    near = l1[sm, place, way]
    near.used = start
    if near.ready[part] >= 0:
        counters[_L1_HITS] += 1
        return max(start + machine.l1_latency, near.ready[part])
    counters[_L1_MISSES] += 1
    _pass_l2(machine, memory, counters, start)
    unit.port = max(unit.port, start) + odd  # 64 bytes a cycle
    ready = max(int(memory[_L2]), unit.port) + machine.l2_latency
    far = _far_line(machine, memory, l2, counters, line)
    far.used = start
    if far.ready[part] >= 0:
        ready = max(ready, far.ready[part])
    else:
        _use_dram(machine, memory, 1)
        counters[_READ] += 1
        ready = max(ready, int(memory[_DRAM]) + machine.dram_latency)
        far.ready[part] = ready
    near.ready[part] = ready
    return ready


@numba.njit(cache=True)
def _store_sector(machine, memory, l2, counters, sector, start):
    """Write a sector to L2. L1 writes through and keeps no copy."""
    _pass_l2(machine, memory, counters, start)
    far = _far_line(machine, memory, l2, counters, sector // LINE_SECTORS)
    part = sector % LINE_SECTORS
    far.used = start
    far.ready[part] = max(far.ready[part], 0)
    far.dirty |= 1 << part


@numba.njit(cache=True)
def _far_line(machine, memory, l2, counters, line):
    """The line of L2 for this line, made room for if need be."""
    place = set_of(l2, line)
    way = find_line(l2, 0, place, line)
    if way < 0:
        way, written = replace_line(l2, 0, place, line)
        if written > 0:
            counters[_WRITTEN] += written
            _use_dram(machine, memory, written)
    return l2[0, place, way]


@numba.njit(cache=True)
def _pass_l2(machine, memory, counters, start):
    counters[_L2_SECTORS] += 1
    cycles = SECTOR_BYTES * machine.clock_hz / machine.l2_bytes_per_second
    memory[_L2] = max(memory[_L2], float(start)) + cycles


@numba.njit(cache=True)
def _use_dram(machine, memory, sectors):
    cycles = sectors * SECTOR_BYTES * machine.clock_hz / machine.dram_bytes_per_second
    memory[_DRAM] = max(memory[_DRAM], memory[_L2]) + cycles
