"""What an instruction becomes before it is executed: functions over all threads, and what they touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import (
    TRUE_PREDICATE,
    ZERO_REGISTER,
    Instruction,
    Operand,
    Predicate,
    Register,
)

from .operands import Operands, places
from .undefined import ALL_BITS, PREDICATES, Undefined

Array = NDArray[Any]
Mask: TypeAlias = Array | None  # of threads; None: all of them


@dataclass(frozen=True)
class Operation:
    """An instruction that is no jump.

    Attributes:
        run: executes it for the threads of a mask.
        sources: what it reads, as :meth:`Undefined.of` takes it.
        results: places that it writes.
        spread: how undefined bits go from sources to results, for the threads of a mask, called before
            ``run``; None makes a result undefined where any source is.
    """

    run: Callable[[Mask], None]
    sources: tuple[tuple[int, Any], ...] = ()
    results: tuple[int, ...] = ()
    spread: Callable[[Mask], None] | None = None

    def spread_undefined(self, undefined: Undefined, mask: Mask) -> None:
        """Mark what of the results is undefined; to be called before ``run``."""
        for place, _ in self.sources:
            if undefined.anywhere[place]:
                break
        else:
            for result in self.results:
                if undefined.anywhere[result]:
                    undefined.set(result, None, mask)
            return
        if self.spread:
            self.spread(mask)
            return
        found = undefined.of(self.sources)
        assert found is not None
        everything = found.astype(np.uint32) * ALL_BITS
        for result in self.results:
            undefined.set(result, everything, mask)


Builder: TypeAlias = Callable[[Instruction, Operands], Operation]


class Unsupported(Exception):
    """An opcode, modifier or operand that the emulator does not know."""


def allow(instruction: Instruction, *modifiers: str) -> None:
    """Refuse modifiers other than these."""
    unknown = set(instruction.modifiers) - set(modifiers)
    if unknown:
        raise Unsupported(f"modifiers {sorted(unknown)}")


def result_places(*operands: Operand, registers: int = 1) -> tuple[int, ...]:
    """Places that results in these operands take, so many registers from each."""
    found: list[int] = []
    for operand in operands:
        if isinstance(operand, Predicate) and operand.number != TRUE_PREDICATE:
            found.append(PREDICATES + operand.number)
        elif isinstance(operand, Register) and operand.number != ZERO_REGISTER:
            found.extend(operand.number + further for further in range(registers))
    return tuple(found)


def split_results(operands: tuple[Operand, ...]) -> tuple[Operand, list[Operand], tuple[Operand, ...]]:
    """Destination register, predicates that follow it, and sources, of ``R1, P0, P1, a, b, c``."""
    carries: list[Operand] = []
    for operand in operands[1:]:
        if not isinstance(operand, Predicate) or len(carries) == 2:
            break
        carries.append(operand)
    return operands[0], carries, operands[1 + len(carries) :]


def one_result(
    instruction: Instruction,
    operands: Operands,
    sources: tuple[Operand, ...],
    compute: Callable[[], Any],
    move: Callable[[Array], Array] | None = None,
) -> Operation:
    """An operation whose only result is one register.

    ``move`` tells which bits of the result ``[N]`` uint32 depend on given bits of any source; all by default.
    """
    write = operands.to_register(instruction.operands[0])
    read, results = places(*sources), result_places(instruction.operands[0])
    undefined = operands.threads.undefined

    def spread(mask: Mask) -> None:
        assert move is not None
        marks: Any = np.zeros(operands.threads.count, np.uint32)
        for place, which in read:
            marks = marks | undefined.bits[place] & which
        for result in results:
            undefined.set(result, move(marks), mask)

    return Operation(lambda mask: write(compute(), mask), read, results, spread if move else None)


def upwards(bits: Array) -> Array:
    """Bits that sums and products depend on: each one on those of the sources up to its own place."""
    return np.negative(bits & np.negative(bits))  # from the lowest one on
