"""Executes a program for some blocks at once.

Threads whose program counters agree advance together, whatever their warp or block, those furthest behind
first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import (
    TRUE_PREDICATE,
    Instruction,
    Predicate,
    Program,
)

from .access import ACCESS
from .bitwise import BITWISE
from .control import Control, Jump
from .convergence import Convergence
from .double import DOUBLE, with_64_bits
from .errors import EmulationError
from .floating import FLOATING
from .half import HALF
from .integer import INTEGER
from .matrix import MATRIX
from .memory import Memory
from .operands import Operands
from .operation import Operation, Unsupported
from .races import RaceList
from .recorder import Recorder
from .threads import WARP, Threads
from .undefined import PREDICATES
from .warp import WARPWIDE

Array = NDArray[Any]

# Threads execute in step and see each other's stores at once, so these change nothing.
_NO_EFFECT = ("NOP", "DEPBAR", "MEMBAR", "ERRBAR", "CCTL", "YIELD", "NANOSLEEP")
_NEVER = Predicate(TRUE_PREDICATE, negate=True)
_BUILDERS = {**INTEGER, **BITWISE, **FLOATING, **DOUBLE, **HALF, **MATRIX, **WARPWIDE}


# What building an operation raises for operands or modifiers of an unknown form.
_UNKNOWN = (Unsupported, EmulationError, ValueError, StopIteration, KeyError, AssertionError)


class Machine:
    """A program and the threads that execute it.

    Attributes:
        warp_instructions: instructions that warps have issued.
    """

    def __init__(self, program: Program, threads: Threads, memory: Memory, races: RaceList) -> None:
        self.warp_instructions = 0
        self._program, self._threads, self._memory = program, threads, memory
        self._recorder: Recorder | None = None
        self._operands = Operands(threads)
        self._convergence = Convergence(threads)
        self._control = Control(program, self._operands, self._convergence, memory.shared)
        self._operations: list[Operation | None] = []
        self._jumps: list[Jump | None] = []
        self._races = races
        for instruction in program.instructions:
            problem = self.problem(instruction)
            if problem:
                raise EmulationError(problem)

    def problem(self, instruction: Instruction) -> str:
        """Add an instruction; returns why it cannot be executed, or nothing."""
        try:
            self._add(instruction)
        except _UNKNOWN as error:
            return f"{instruction.text} at {instruction.address:#x}: not known to the emulator: {error}"
        return ""

    def _add(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        operation = jump = None
        if instruction.predicate == _NEVER or opcode in _NO_EFFECT:
            operation = Operation(lambda mask: None)
        elif opcode in _BUILDERS:
            build = with_64_bits(instruction) or _BUILDERS[opcode]
            operation = build(instruction, self._operands)
        elif opcode in ACCESS:
            operation = ACCESS[opcode](instruction, self._operands, self._memory, self._races)
        else:
            jump = self._control.jump(instruction)
        self._operations.append(operation)
        self._jumps.append(jump)

    def restart(self, blocks: Array) -> None:
        """Make ready to execute the program for as many other blocks."""
        self._threads.restart(blocks)
        self._memory.shared.restart()
        self._memory.local.restart()
        self._convergence.restart()

    def run(self, most_steps: int, recorder: Recorder | None) -> None:
        """Execute until all threads have exited.

        Raises:
            EmulationError: see :func:`page4.experiments.sm70.emulator.run`.
        """
        threads, convergence = self._threads, self._convergence
        self._recorder = recorder
        while threads.alive.any():
            found = convergence.next_group()
            if found is None:
                self._control.release()
                found = convergence.next_group()
                if found is None:
                    raise threads.fail(self._waiting(), threads.alive, "all threads wait for each other")
            at, group, limit = found
            most_steps = self._advance(at, group, limit, most_steps)

    def _waiting(self) -> Instruction:
        thread = int(np.argmax(self._threads.alive))
        return self._program.instructions[int(self._convergence.counters[thread])]

    def _advance(self, at: int, group: Array | None, limit: int, most_steps: int) -> int:
        """Execute for a group until it parts, waits, exits or reaches other threads."""
        threads, memory, recorder = self._threads, self._memory, self._recorder
        undefined, operations, jumps = threads.undefined, self._operations, self._jumps
        instructions = self._program.instructions
        warps = _count_warps(threads.count, group)
        while True:
            if at >= len(instructions):
                raise EmulationError(f"{self._program.name}: execution ran past the last instruction")
            instruction = instructions[at]
            most_steps -= 1
            if most_steps < 0:
                raise EmulationError(
                    f"{instruction.text} at {instruction.address:#x}: too many steps; a loop?"
                )
            mask = group
            guard = instruction.predicate
            if guard.number != TRUE_PREDICATE:
                mask = self._guarded(instruction, group)
            elif guard.negate:
                mask = np.zeros(threads.count, bool)
            self.warp_instructions += warps
            jump = jumps[at]
            if jump is None:
                memory.last = None
                if mask is group or mask.any():  # type: ignore[union-attr]
                    operation = operations[at]
                    assert operation is not None
                    operation.spread_undefined(undefined, mask)
                    operation.run(mask)
                if recorder:
                    recorder.record(at, group, mask, memory.last)
                at += 1
                if at < limit:
                    continue
            else:
                if recorder:
                    recorder.record(at, group, mask, None)
                following = jump(group, mask)
                if following is None:
                    return most_steps
                at = following
                if at < limit and at > instruction.index:
                    continue
                if group is None:
                    continue
            self._convergence.counters[slice(None) if group is None else group] = at
            return most_steps

    def _guarded(self, instruction: Instruction, group: Array | None) -> Array:
        """Threads of a group for which the instruction's predicate holds."""
        threads, guard = self._threads, instruction.predicate
        holds = threads.predicates[guard.number]
        if threads.undefined.anywhere[PREDICATES + guard.number]:
            wrong = threads.undefined.bits[PREDICATES + guard.number] != 0
            wrong = wrong if group is None else wrong & group
            if wrong.any():
                raise threads.fail(instruction, wrong, f"P{guard.number} depends on an undefined value")
        if group is None:
            return ~holds if guard.negate else holds.copy()
        return group & ~holds if guard.negate else group & holds


def _count_warps(threads: int, group: Array | None) -> int:
    return threads // WARP if group is None else int(group.reshape(-1, WARP).any(1).sum())
