"""Runs a kernel over a grid of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import Program
from page4.experiments.sm70.trace import Trace
from page4.kernels.errors import InputError

from .errors import Race
from .global_memory import Buffer, GlobalMemory
from .local_memory import LocalMemory
from .machine import Machine
from .memory import Memory
from .races import RaceList
from .recorder import Recorder, joined
from .shared_memory import SharedMemory
from .threads import WARP, Threads

Array = NDArray[Any]
Argument: TypeAlias = int | float | np.generic | Array | Buffer | None

PARAMETERS = 0x160  # where they begin in the constant bank
_STACK = 0x28  # where the end of local memory is given
_STACK_BYTES = 16384
_THREADS_AT_ONCE = 2048
_MOST_STEPS = 50_000_000
_CONSTANT_BYTES = 0x1160  # at most: 4 KiB of parameters
_SCRATCH_POINTERS = 2  # that kernels of Triton 3.6 take after the arguments


@dataclass(frozen=True)
class Run:
    """What happened besides the results, which are in the arrays.

    Attributes:
        races: the first one of every instruction and kind.
        trace: if it was asked for.
        warp_instructions: instructions that warps issued.
    """

    races: list[Race]
    trace: Trace | None
    warp_instructions: int


def run(
    program: Program,
    *,
    grid: tuple[int, int, int],
    warps: int,
    arguments: Sequence[Argument],
    shared_bytes: int,
    blocks: Sequence[tuple[int, int, int]] | None = None,
    trace: bool = False,
    check_races: bool = True,
) -> Run:
    """Execute a kernel.

    Args:
        program: the kernel.
        grid: blocks along x, y and z.
        warps: warps of a block.
        arguments: the kernel's run-time arguments in their order. An array, or a :class:`Buffer`, is passed
            as its address and changed in place; an int takes 32 bits, or 64 if it needs them; a float is
            float32; a NumPy scalar has its own type; None is a null pointer. The null pointers that Triton
            adds are added here too.
        shared_bytes: shared memory of a block.
        blocks: which blocks to run; all of them by default.
        trace: record what the warps do.
        check_races: look for races in shared memory.

    Raises:
        EmulationError: the kernel has an instruction that the emulator does not know, accesses memory out of
            bounds or misaligned, or lets an undefined value, one that nobody wrote, decide about an address,
            a branch or what is stored in global memory; or threads wait for each other for ever.
        InputError: an argument cannot be passed.
    """
    everything = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    places = np.array(everything if blocks is None else blocks, np.int32).reshape(-1, 3)
    if len(places) == 0 or warps < 1:
        raise InputError("a launch needs at least one block with at least one warp")
    memory = GlobalMemory()
    uses_stack = any(instruction.memory_space == "local" for instruction in program.instructions)
    stack = _STACK_BYTES if uses_stack else 0
    constants = _constants(grid, warps, stack, arguments, memory)
    by_byte = any(i.memory_space == "shared" and i.access_bytes < 4 for i in program.instructions)
    races: dict[tuple[int, str], Race] = {}
    traces: list[Trace] = []
    executed = 0
    machine: Machine | None = None
    at_once = max(1, _THREADS_AT_ONCE // (warps * WARP))
    with np.errstate(all="ignore"):
        for first in range(0, len(places), at_once):
            now = places[first : first + at_once]
            if machine is None or len(now) < at_once:
                threads = Threads(now, warps, constants)
                shared = SharedMemory(len(now), shared_bytes, warps, by_byte=by_byte, check_races=check_races)
                space = Memory(memory, shared, LocalMemory(threads.count, stack))
                machine = Machine(program, threads, space, RaceList(threads, races))
            else:
                machine.restart(now)
            recorder = Recorder(threads) if trace else None
            before = machine.warp_instructions
            machine.run(_MOST_STEPS, recorder)
            executed += machine.warp_instructions - before
            if recorder:
                traces.append(recorder.trace())
    return Run(list(races.values()), joined(traces) if traces else None, executed)


def unknown_instructions(program: Program) -> list[str]:
    """Instructions that the emulator cannot execute, each as text with the reason; whether reached or not."""
    constants = np.zeros(_CONSTANT_BYTES, np.uint8)
    threads = Threads(np.zeros((1, 3), np.int32), 1, constants)
    memory = Memory(
        GlobalMemory(), SharedMemory(1, 4, 1, by_byte=False, check_races=False), LocalMemory(WARP, 16)
    )
    machine = Machine(replace(program, instructions=()), threads, memory, RaceList(threads, {}))
    return [problem for instruction in program.instructions if (problem := machine.problem(instruction))]


def _constants(
    grid: tuple[int, int, int], warps: int, stack: int, arguments: Sequence[Argument], memory: GlobalMemory
) -> Array:
    """The constant bank as bytes: sizes of the launch, then the arguments, each aligned to its size."""
    head = np.zeros(PARAMETERS // 4, np.uint32)
    head[:3] = warps * WARP, 1, 1
    head[3:6] = grid
    head[_STACK // 4] = stack
    parts, end = [head.view(np.uint8)], PARAMETERS
    for argument in (*arguments, *[None] * _SCRATCH_POINTERS):
        value = _value(argument, memory)
        gap = -end % value.nbytes
        parts += [np.zeros(gap, np.uint8), value.view(np.uint8)]
        end += gap + value.nbytes
    return np.concatenate(parts)


def _value(argument: Argument, memory: GlobalMemory) -> Array:
    if argument is None:
        return np.zeros(1, np.uint64)
    if isinstance(argument, (np.ndarray, Buffer)):
        buffer = argument if isinstance(argument, Buffer) else Buffer(argument)
        return np.array([memory.add(buffer)], np.uint64)
    if isinstance(argument, np.generic):
        return np.array([argument])
    if isinstance(argument, bool) or not isinstance(argument, (int, float)):
        raise InputError(f"{argument!r} is no argument of a kernel")
    if isinstance(argument, float):
        return np.array([argument], np.float32)
    return np.array([argument], np.int32 if -(2**31) <= argument < 2**31 else np.int64)
