"""Instructions that decide where threads go on, wait or end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import (
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

from .convergence import Convergence
from .operands import Operands
from .operation import Unsupported
from .shared_memory import SharedMemory
from .threads import WARP
from .undefined import PREDICATES

Array = NDArray[Any]

# Takes the threads that execute the instruction, None for all, and those for which its predicate holds.
# Returns the next instruction of all of them, or None where their program counters have been set.
Jump: TypeAlias = Callable[[Array | None, Array | None], int | None]


class Control:
    """Makes jumps for one set of threads."""

    def __init__(
        self, program: Program, operands: Operands, convergence: Convergence, shared: SharedMemory
    ) -> None:
        self._program, self._operands, self._convergence = program, operands, convergence
        self._threads, self._shared = operands.threads, shared
        self._index = {instruction.address: instruction.index for instruction in program.instructions}

    def jump(self, instruction: Instruction) -> Jump:
        """How an instruction is executed.

        Raises:
            Unsupported: it is not known.
        """
        if instruction.opcode not in _BUILDERS:
            raise Unsupported("opcode")
        return _BUILDERS[instruction.opcode](self, instruction)

    def release(self) -> None:
        """Let go on who need wait no longer."""
        complete = self._convergence.release()
        if complete is not None:
            self._shared.barrier(None if complete.all() else np.flatnonzero(complete))

    def _everyone(self, mask: Array | None) -> Array:
        return np.ones(self._threads.count, bool) if mask is None else mask

    def branch(self, instruction: Instruction) -> Jump:
        """``BRA``; ``.DIV`` and ``.CONV`` jump where the warp's threads are not, or are, all together."""
        *conditions, target = instruction.operands
        assert isinstance(target, Target)
        fulfil = self._conditions(instruction, conditions)
        apart, together = "DIV" in instruction.modifiers, "CONV" in instruction.modifiers
        threads = self._threads

        def jump(group: Array | None, mask: Array | None) -> int | None:
            if mask is group and not conditions and not apart and not together:
                return target.index
            taken = fulfil(self._everyone(mask))
            if apart or together:
                missing = threads.alive & ~self._everyone(group)
                parted = np.repeat(missing.reshape(-1, WARP).any(1), WARP)
                taken = taken & (parted if apart else ~parted)
            return self._part(group, taken, target.index, instruction.index + 1)

        return jump

    def _conditions(
        self, instruction: Instruction, conditions: Sequence[Operand]
    ) -> Callable[[Array], Array]:
        """Of threads, those for which all predicates among an instruction's operands hold."""
        reads = [self._operands.predicate(operand) for operand in conditions]
        numbers = [o.number for o in conditions if isinstance(o, Predicate)]
        threads, undefined = self._threads, self._threads.undefined

        def fulfil(taken: Array) -> Array:
            for number, read in zip(numbers, reads, strict=True):
                wrong = undefined.bits[PREDICATES + number] != 0
                if undefined.anywhere[PREDICATES + number] and (wrong & taken).any():
                    raise threads.fail(instruction, wrong & taken, f"P{number} depends on an undefined value")
                taken = taken & read()
            return taken

        return fulfil

    def _part(self, group: Array | None, taken: Array, target: int, following: int) -> int | None:
        members = self._everyone(group)
        if not taken.any():
            return following
        if (taken == members).all():
            return target
        self._convergence.counters[members & ~taken] = following
        self._convergence.counters[taken] = target
        return None

    def call(self, instruction: Instruction) -> Jump:
        """``CALL.REL``: the caller has put the return address into registers itself."""
        (target,) = instruction.operands
        assert isinstance(target, Target)

        def jump(group: Array | None, mask: Array | None) -> int | None:
            return self._part(group, self._everyone(mask), target.index, instruction.index + 1)

        return jump

    def leave(self, instruction: Instruction) -> Jump:
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

    def exit(self, instruction: Instruction) -> Jump:
        """``EXIT``, of threads for which the predicates among the operands hold, too."""
        fulfil = self._conditions(instruction, instruction.operands)

        def jump(group: Array | None, mask: Array | None) -> int | None:
            leaving, members = fulfil(self._everyone(mask)), self._everyone(group)
            if not leaving.any():
                return instruction.index + 1
            self._convergence.counters[members] = instruction.index + 1
            self._threads.alive &= ~leaving
            self._threads.undefined.forget(leaving)
            self.release()
            return None

        return jump

    def together(self, instruction: Instruction) -> Jump:
        """``BSSY``."""
        name = _name(instruction.operands[0])

        def jump(group: Array | None, mask: Array | None) -> int | None:
            self._convergence.gather(name, self._everyone(mask))
            return instruction.index + 1

        return jump

    def break_out(self, instruction: Instruction) -> Jump:
        """``BREAK``: threads leave a convergence register."""
        name = _name(instruction.operands[-1])

        def jump(group: Array | None, mask: Array | None) -> int | None:
            self._convergence.register(name)[self._everyone(mask)] = False
            self.release()
            return instruction.index + 1

        return jump

    def meet(self, instruction: Instruction) -> Jump:
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
            self.release()
            return None

        return jump

    def barrier(self, instruction: Instruction) -> Jump:
        """``BAR.SYNC``."""
        if instruction.modifiers != ("SYNC",) or instruction.operands != (Immediate(0),):
            raise Unsupported("barriers other than BAR.SYNC 0x0")

        def jump(group: Array | None, mask: Array | None) -> int | None:
            members, waiting = self._everyone(group), self._everyone(mask)
            if mask is group and not (self._threads.alive & ~members).any():
                self._shared.barrier(None)
                return instruction.index + 1
            self._convergence.counters[members & ~waiting] = instruction.index + 1
            self._convergence.wait(instruction.index, waiting)
            self.release()
            return None

        return jump

    def move_register(self, instruction: Instruction) -> Jump:
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


_BUILDERS: dict[str, Callable[[Control, Instruction], Jump]] = {
    "BRA": Control.branch, "CALL": Control.call, "RET": Control.leave, "EXIT": Control.exit,
    "BSSY": Control.together, "BSYNC": Control.meet, "WARPSYNC": Control.meet, "BREAK": Control.break_out,
    "BAR": Control.barrier, "BMOV": Control.move_register,
}  # fmt: skip
