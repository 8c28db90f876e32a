"""Executes a program for some blocks at once.

Threads whose program counters agree advance together, whatever their warp or block, those furthest behind
first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import (
    TRUE_PREDICATE,
    ZERO_REGISTER,
    Immediate,
    Instruction,
    Operand,
    Predicate,
    Program,
    Register,
    Special,
    Target,
)

from .access import ACCESS
from .bitwise import BITWISE
from .convergence import Convergence
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
_BUILDERS = {**INTEGER, **BITWISE, **FLOATING, **HALF, **MATRIX, **WARPWIDE}


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
        self._index = {instruction.address: instruction.index for instruction in program.instructions}
        self._operations: list[Operation | None] = []
        self._jumps: list[Callable[[Array | None, Array | None], int | None] | None] = []
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
            operation = _BUILDERS[opcode](instruction, self._operands)
        elif opcode in ACCESS:
            operation = ACCESS[opcode](instruction, self._operands, self._memory, self._races)
        elif opcode in _JUMPS:
            jump = _JUMPS[opcode](self, instruction)
        else:
            raise Unsupported("opcode")
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
                self._release()
                found = convergence.next_group()
                if found is None:
                    raise threads.fail(self._waiting(), threads.alive, "all threads wait for each other")
            at, group, limit = found
            most_steps = self._advance(at, group, limit, most_steps)

    def _waiting(self) -> Instruction:
        thread = int(np.argmax(self._threads.alive))
        return self._program.instructions[int(self._convergence.counters[thread])]

    def _release(self) -> None:
        complete = self._convergence.release()
        if complete is not None:
            self._memory.shared.barrier(None if complete.all() else np.flatnonzero(complete))

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

    # --- jumps: (group, those of it for which the predicate holds) -> next instruction of the whole group, or
    # None

    def _everyone(self, mask: Array | None) -> Array:
        return np.ones(self._threads.count, bool) if mask is None else mask

    def branch(self, instruction: Instruction) -> Callable[[Array | None, Array | None], int | None]:
        """``BRA``; ``.DIV`` and ``.CONV`` jump where the warp's threads are not, or are, all together."""
        *conditions, target = instruction.operands
        assert isinstance(target, Target)
        reads = [self._operands.predicate(operand) for operand in conditions]
        numbers = [o.number for o in conditions if isinstance(o, Predicate)]
        apart, together = "DIV" in instruction.modifiers, "CONV" in instruction.modifiers
        threads, undefined = self._threads, self._threads.undefined

        def jump(group: Array | None, mask: Array | None) -> int | None:
            if mask is group and not reads and not apart and not together:
                return target.index
            taken = self._everyone(mask)
            for number, read in zip(numbers, reads, strict=True):
                wrong = undefined.bits[PREDICATES + number] != 0
                if undefined.anywhere[PREDICATES + number] and (wrong & taken).any():
                    raise threads.fail(instruction, wrong & taken, f"P{number} depends on an undefined value")
                taken = taken & read()
            if apart or together:
                missing = threads.alive & ~self._everyone(group)
                parted = np.repeat(missing.reshape(-1, WARP).any(1), WARP)
                taken = taken & (parted if apart else ~parted)
            return self._part(group, taken, target.index, instruction.index + 1)

        return jump

    def _part(self, group: Array | None, taken: Array, target: int, following: int) -> int | None:
        members = self._everyone(group)
        if not taken.any():
            return following
        if (taken == members).all():
            return target
        self._convergence.counters[members & ~taken] = following
        self._convergence.counters[taken] = target
        return None

    def call(self, instruction: Instruction) -> Callable[[Array | None, Array | None], int | None]:
        """``CALL.REL``: the caller has put the return address into registers itself."""
        (target,) = instruction.operands
        assert isinstance(target, Target)

        def jump(group: Array | None, mask: Array | None) -> int | None:
            return self._part(group, self._everyone(mask), target.index, instruction.index + 1)

        return jump

    def leave(self, instruction: Instruction) -> Callable[[Array | None, Array | None], int | None]:
        """``RET.REL``: to the address in a register pair, counted from a label."""
        register, base = instruction.operands
        assert isinstance(register, Register) and isinstance(base, Target)
        low = self._threads.registers[register.number]
        undefined = self._threads.undefined

        def jump(group: Array | None, mask: Array | None) -> int | None:
            start = self._program.instructions[base.index].address
            leaving, members = self._everyone(mask), self._everyone(group)
            if undefined.anywhere[register.number]:
                wrong = leaving & (undefined.bits[register.number] != 0)
                if wrong.any():
                    raise self._threads.fail(instruction, wrong, "an undefined return address")
            counters = self._convergence.counters
            counters[members & ~leaving] = instruction.index + 1
            for address in np.unique(low[leaving]):
                if start + int(address) not in self._index:
                    raise self._threads.fail(instruction, leaving, f"returns to {int(address):#x}")
                counters[leaving & (low == address)] = self._index[start + int(address)]
            return None

        return jump

    def exit(self, instruction: Instruction) -> Callable[[Array | None, Array | None], int | None]:
        """``EXIT``."""

        def jump(group: Array | None, mask: Array | None) -> int | None:
            leaving, members = self._everyone(mask), self._everyone(group)
            if not leaving.any():
                return instruction.index + 1
            self._convergence.counters[members] = instruction.index + 1
            self._threads.alive &= ~leaving
            self._threads.undefined.forget(leaving)
            self._release()
            return None

        return jump

    def together(self, instruction: Instruction) -> Callable[[Array | None, Array | None], int | None]:
        """``BSSY``."""
        name = _name(instruction.operands[0])

        def jump(group: Array | None, mask: Array | None) -> int | None:
            self._convergence.gather(name, self._everyone(mask))
            return instruction.index + 1

        return jump

    def break_out(self, instruction: Instruction) -> Callable[[Array | None, Array | None], int | None]:
        """``BREAK``: threads leave a convergence register."""
        name = _name(instruction.operands[-1])

        def jump(group: Array | None, mask: Array | None) -> int | None:
            self._convergence.register(name)[self._everyone(mask)] = False
            self._release()
            return instruction.index + 1

        return jump

    def meet(self, instruction: Instruction) -> Callable[[Array | None, Array | None], int | None]:
        """``BSYNC`` and ``WARPSYNC``."""
        (operand,) = instruction.operands
        threads, convergence = self._threads, self._convergence
        read = None if isinstance(operand, Special) else self._operands.bits(operand)

        def party(meeting: Array) -> Array:
            if read is None:
                return convergence.register(_name(operand))
            words = np.broadcast_to(read(), threads.count).reshape(-1, WARP)
            speaker = meeting.reshape(-1, WARP).argmax(1)  # threads that meet name the same party
            return threads.members(words[np.arange(len(words)), speaker])

        def jump(group: Array | None, mask: Array | None) -> int | None:
            members, meeting = self._everyone(group), self._everyone(mask)
            if not (threads.alive & ~members).any() and mask is group:
                return instruction.index + 1  # all of the living are here
            convergence.counters[members & ~meeting] = instruction.index + 1
            convergence.meet(instruction.index, meeting, party(meeting))
            self._release()
            return None

        return jump

    def barrier(self, instruction: Instruction) -> Callable[[Array | None, Array | None], int | None]:
        """``BAR.SYNC``."""
        if instruction.modifiers != ("SYNC",) or instruction.operands != (Immediate(0),):
            raise Unsupported("barriers other than BAR.SYNC 0x0")

        def jump(group: Array | None, mask: Array | None) -> int | None:
            members, waiting = self._everyone(group), self._everyone(mask)
            if mask is group and not (self._threads.alive & ~members).any():
                self._memory.shared.barrier(None)
                return instruction.index + 1
            self._convergence.counters[members & ~waiting] = instruction.index + 1
            self._convergence.wait(instruction.index, waiting)
            self._release()
            return None

        return jump

    def move_register(self, instruction: Instruction) -> Callable[[Array | None, Array | None], int | None]:
        """``BMOV``: a convergence register into a register, or back; ``.CLEAR`` empties it."""
        target, source = instruction.operands
        threads, convergence = self._threads, self._convergence
        if isinstance(target, Special):
            value = self._operands.bits(source)

            def jump(group: Array | None, mask: Array | None) -> int | None:
                words = np.broadcast_to(value(), threads.count)
                members = (words >> threads.lane.astype(np.uint32) & 1).astype(bool)
                warps = np.repeat(self._everyone(mask).reshape(-1, WARP).any(1), WARP)
                np.copyto(convergence.register(_name(target)), members, where=warps)
                return instruction.index + 1

            return jump
        write = self._operands.to_register(target)
        number = target.number if isinstance(target, Register) else ZERO_REGISTER

        def jump_back(group: Array | None, mask: Array | None) -> int | None:
            register = convergence.register(_name(source))
            write(np.repeat(threads.ballots(register), WARP), mask)
            threads.undefined.set(number, None, mask)
            if "CLEAR" in instruction.modifiers:
                warps = np.repeat(self._everyone(mask).reshape(-1, WARP).any(1), WARP)
                register[warps] = False
            return instruction.index + 1

        return jump_back


def _name(operand: Operand) -> str:
    if not isinstance(operand, Special):
        raise Unsupported("operands")
    return operand.name


def _count_warps(threads: int, group: Array | None) -> int:
    return threads // WARP if group is None else int(group.reshape(-1, WARP).any(1).sum())


_JUMPS: dict[str, Callable[[Machine, Instruction], Callable[[Array | None, Array | None], int | None]]] = {
    "BRA": Machine.branch, "CALL": Machine.call, "RET": Machine.leave, "EXIT": Machine.exit,
    "BSSY": Machine.together, "BSYNC": Machine.meet, "WARPSYNC": Machine.meet, "BREAK": Machine.break_out,
    "BAR": Machine.barrier, "BMOV": Machine.move_register,
}  # fmt: skip
