"""Reads and writes operands of instructions over all threads.

A reader is made once per operand and returns an array over threads, or a scalar where all threads agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import (
    ZERO_REGISTER,
    Constant,
    Immediate,
    Operand,
    Predicate,
    Register,
)

from .errors import EmulationError
from .threads import Threads
from .undefined import ALL_BITS, PREDICATES

Array = NDArray[Any]
Reader: TypeAlias = Callable[[], Any]
Writer: TypeAlias = Callable[[Any, Array | None], None]

_HALF_BITS = {"H0_H0": np.uint32(0xFFFF), "H1_H1": np.uint32(0xFFFF0000)}
NAN_FLOAT = 0x7FFFFFFF  # what arithmetic gives for any NaN


class Operands:
    """Makes readers and writers for one set of threads."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self._zero = np.zeros(threads.count, np.uint32)

    def constant(self, operand: Constant, size: int = 4) -> Any:
        """A value of the constant bank, as uint32 or uint64."""
        if operand.bank != 0 or operand.register != ZERO_REGISTER:
            raise EmulationError(f"constants other than c[0x0][offset]: {operand}")
        end = operand.offset + size
        if end > len(self.threads.constants):
            raise EmulationError(
                f"c[0x0][{operand.offset:#x}] lies behind the arguments, which end at "
                f"{len(self.threads.constants):#x}"
            )
        return self.threads.constants[operand.offset : end].view(np.uint32 if size == 4 else np.uint64)[0]

    def bits(self, operand: Operand) -> Reader:
        """32 bits; ``-`` is the two's complement and ``~`` the inverse."""
        if isinstance(operand, Immediate):
            immediate = immediate_bits(operand)
            return lambda: immediate
        if isinstance(operand, Register):
            row = self.threads.registers[operand.number]
            if operand.negate:
                return lambda: np.negative(row)
            if operand.invert:
                return lambda: np.invert(row)
            return lambda: row
        if isinstance(operand, Constant):
            value = self.constant(operand)
            value = np.negative(value) if operand.negate else ~value if operand.invert else value
            return lambda: value
        raise EmulationError(f"no 32-bit value: {operand}")

    def signed(self, operand: Operand) -> Reader:
        """32 bits as int32."""
        if isinstance(operand, Register) and not operand.negate and not operand.invert:
            row = self.threads.registers[operand.number].view(np.int32)
            return lambda: row
        bits = self.bits(operand)
        return lambda: bits().view(np.int32)

    def wide(self, operand: Operand, *, signed: bool = False) -> Reader:
        """64 bits of a register pair or a constant; an immediate is extended."""
        if isinstance(operand, Register) and operand.number != ZERO_REGISTER:
            low, high = self.threads.registers[operand.number : operand.number + 2]

            def pair() -> Any:
                value = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
                return np.negative(value) if operand.negate else value

            return pair
        if isinstance(operand, Constant):
            constant = self.constant(operand, 8)
            return lambda: constant
        value = self.bits(operand)()
        extended = (
            value.view(np.int32).astype(np.int64).view(np.uint64) if signed else value.astype(np.uint64)
        )
        return lambda: extended

    def floats(self, operand: Operand, *, flush: bool = False) -> Reader:
        """32 bits as float32, with the modifiers ``|x|`` and then ``-``; ``flush`` makes subnormals 0."""
        plain = self._plain_floats(operand)
        absolute = getattr(operand, "absolute", False)
        negate = getattr(operand, "negate", False)
        if absolute or negate or flush:

            def read() -> Any:
                value = np.abs(plain()) if absolute else plain()
                value = np.negative(value) if negate else value
                return flush_subnormal(value) if flush else value

            return read
        return plain

    def _plain_floats(self, operand: Operand) -> Reader:
        if isinstance(operand, Register):
            row = self.threads.registers[operand.number].view(np.float32)
            return lambda: row
        if isinstance(operand, Constant):
            value = self.constant(operand).view(np.float32)
        elif isinstance(operand, Immediate):
            value = immediate_bits(operand).view(np.float32)
        else:
            raise EmulationError(f"no float: {operand}")
        return lambda: value

    def predicate(self, operand: Operand) -> Reader:
        """A predicate as bool."""
        if not isinstance(operand, Predicate):
            raise EmulationError(f"no predicate: {operand}")
        row = self.threads.predicates[operand.number]
        if operand.negate:
            return lambda: ~row
        return lambda: row

    def to_register(self, operand: Operand, further: int = 0) -> Writer:
        """Writes uint32, int32 or float32 to a register, or to one behind it."""
        if not isinstance(operand, Register):
            raise EmulationError(f"no destination: {operand}")
        if operand.number == ZERO_REGISTER:
            return _nowhere
        row = self.threads.registers[operand.number + further]
        views = {np.dtype(kind): row.view(kind) for kind in (np.uint32, np.int32, np.float32)}

        def write(value: Any, mask: Array | None) -> None:
            target = views[value.dtype]
            if mask is None:
                target[...] = value
            else:
                np.copyto(target, value, where=mask)

        return write

    def to_predicate(self, operand: Operand) -> Writer:
        """Writes bool to a predicate."""
        if not isinstance(operand, Predicate):
            raise EmulationError(f"no destination: {operand}")
        if operand.number == 7:
            return _nowhere
        row = self.threads.predicates[operand.number]

        def write(value: Any, mask: Array | None) -> None:
            if mask is None:
                row[...] = value
            else:
                np.copyto(row, value, where=mask)

        return write


def immediate_bits(operand: Immediate) -> Any:
    """An immediate as uint32: an integer's two's complement, or a float32's bits."""
    if isinstance(operand.value, int):
        return np.uint32(operand.value & 0xFFFFFFFF)
    if operand.value != operand.value:
        return np.uint32(NAN_FLOAT)
    return np.float32(operand.value).view(np.uint32)


def flush_subnormal(value: Any) -> Any:
    """Subnormal float32 become zeros of their sign."""
    small = np.abs(value) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), value), value) if np.any(small) else value


def places(*operands: Operand, wide: tuple[int, ...] = ()) -> tuple[tuple[int, Any], ...]:
    """What the operands read, as :meth:`Undefined.of` takes it; those at indices ``wide`` are pairs."""
    found: list[tuple[int, Any]] = []
    for index, operand in enumerate(operands):
        if isinstance(operand, Predicate):
            found.append((PREDICATES + operand.number, ALL_BITS))
        elif isinstance(operand, Register) and operand.number != ZERO_REGISTER:
            found.append((operand.number, _HALF_BITS.get(operand.selector, ALL_BITS)))
            if index in wide:
                found.append((operand.number + 1, ALL_BITS))
    return tuple(found)


def _nowhere(value: Any, mask: Array | None) -> None:
    """What is written to ``RZ`` or ``PT`` is lost."""
