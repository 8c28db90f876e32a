"""FP64 arithmetic, in pairs of registers, and conversions between 64 bits and 32.

``DFMA`` is rounded once: Boldo and Melquiond's algorithm (see :mod:`.rounding`) adds what the roundings of
product and sum have lost, rounded to odd. Beyond the range in which that is exact it is a product and a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from page4.experiments.sm70.assembly import Immediate, Instruction, Operand, Predicate, Register

from .floating import COMPARE, rounding_of, whole_number
from .integer import COMBINE
from .operands import Operands, Reader, places
from .operation import Builder, Mask, Operation, Unsupported, allow, result_places
from .rounding import odd_sum, round_float

_NAN = np.uint64(0xFFF8000000000000).view(np.float64)
_KINDS = {
    (True, True): np.uint64,
    (True, False): np.int64,
    (False, True): np.uint32,
    (False, False): np.int32,
}
_SPLITTER = np.float64(2**27 + 1)


def doubles(operands: Operands, operand: Operand) -> Reader:
    """Reads float64 from a register pair, a constant or an immediate, with its modifiers."""
    if isinstance(operand, Immediate):
        fixed = np.float64(operand.value)
        return lambda: fixed
    absolute, negate = getattr(operand, "absolute", False), getattr(operand, "negate", False)
    plain = operands.wide(_plain(operand))

    def read() -> Any:
        value = plain().view(np.float64)
        value = np.abs(value) if absolute else value
        return np.negative(value) if negate else value

    return read


def _plain(operand: Operand) -> Operand:
    return Register(operand.number) if isinstance(operand, Register) else operand


def pair_result(
    instruction: Instruction,
    operands: Operands,
    sources: tuple[tuple[int, Any], ...],
    compute: Callable[[], Any],
) -> Operation:
    """An operation whose result of 64 bits goes to a register pair."""
    target = instruction.operands[0]
    low, high = operands.to_register(target), operands.to_register(target, 1)

    def run(mask: Mask) -> None:
        bits = np.asarray(compute()).view(np.uint64)
        low((bits & np.uint64(0xFFFFFFFF)).astype(np.uint32), mask)
        high((bits >> np.uint64(32)).astype(np.uint32), mask)

    return Operation(run, sources, result_places(target, registers=2))


def _canonical(value: Any) -> Any:
    return np.where(value != value, _NAN, value)


def _halves(value: Any) -> tuple[Any, Any]:
    """A float64 as a sum of two with half the bits (Veltkamp)."""
    large = value * _SPLITTER
    high = large - (large - value)
    return high, value - high


def _lost(a: Any, b: Any, product: Any) -> Any:
    """What rounding took from a product, exactly (Dekker)."""
    (a1, a0), (b1, b0) = _halves(a), _halves(b)
    return ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0


def fused(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of float64, rounded once."""
    product = np.asarray(a * b)
    lost = _lost(a, b, product)
    sum_low, error_low = _two_sum(c, lost)
    total, error = _two_sum(product, sum_low)
    once = total + odd_sum(error_low, error)
    return _canonical(np.where(np.isfinite(lost) & np.isfinite(once), once, product + c))


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    total = a + b
    again = total - a
    return total, (a - (total - again)) + (b - again)


def _directed(value: Any, lost: Any, mode: str) -> Any:
    """A result that was rounded to nearest, and what that lost, rounded as a mode says."""
    up, down = np.nextafter(value, np.inf), np.nextafter(value, -np.inf)
    upwards = {"RP": lost > 0, "RM": False, "RZ": (lost > 0) & (value < 0)}[mode]
    downwards = {"RM": lost < 0, "RP": False, "RZ": (lost < 0) & (value > 0)}[mode]
    return np.where(upwards, up, np.where(downwards, down, value))


def _arithmetic(
    instruction: Instruction,
    operands: Operands,
    compute: Callable[..., Any],
    count: int,
    lost: Callable[..., Any] | None = None,
) -> Operation:
    allow(instruction, *(("RP", "RM", "RZ") if lost else ()))
    mode = rounding_of(instruction)
    sources = instruction.operands[1 : 1 + count]
    readers = [doubles(operands, operand) for operand in sources]

    def result() -> Any:
        given = [read() for read in readers]
        value = compute(*given)
        return _canonical(_directed(value, lost(*given), mode) if lost and mode != "RN" else value)

    return pair_result(instruction, operands, places(*sources, wide=tuple(range(count))), result)


def dadd(instruction: Instruction, operands: Operands) -> Operation:
    """``a + b``."""
    return _arithmetic(instruction, operands, np.add, 2, lambda a, b: _two_sum(a, b)[1])


def dmul(instruction: Instruction, operands: Operands) -> Operation:
    """``a * b``."""
    return _arithmetic(instruction, operands, np.multiply, 2, lambda a, b: _lost(a, b, a * b))


def dfma(instruction: Instruction, operands: Operands) -> Operation:
    """``a * b + c``."""
    return _arithmetic(instruction, operands, fused, 3)


def dsetp(instruction: Instruction, operands: Operands) -> Operation:
    """``P = (a compare b) combine c`` and ``Q = not (a compare b) combine c``."""
    allow(instruction, *COMPARE, *COMBINE)
    first, second, *sources = instruction.operands
    a, b, combined = (
        doubles(operands, sources[0]),
        doubles(operands, sources[1]),
        operands.predicate(sources[2]),
    )
    compare = COMPARE[instruction.modifiers[0]]
    combine = COMBINE[next(name for name in COMBINE if name in instruction.modifiers)]
    write, write_other = operands.to_predicate(first), operands.to_predicate(second)

    def run(mask: Mask) -> None:
        result, other = compare(a(), b()), combined()
        write(combine(result, other), mask)
        if second != Predicate(7):
            write_other(combine(~np.asarray(result), other), mask)

    return Operation(run, places(*sources, wide=(0, 1)), result_places(first, second))


def widened(instruction: Instruction, operands: Operands) -> Operation:
    """``F2F.F64.F32``."""
    allow(instruction, "F64", "F32")
    operand = instruction.operands[1]
    value = operands.floats(operand)
    return pair_result(instruction, operands, places(operand), lambda: _canonical(value().astype(np.float64)))


def narrowed(instruction: Instruction, operands: Operands) -> Operation:
    """``F2F.F32.F64``."""
    allow(instruction, "F32", "F64")
    target, operand = instruction.operands
    value, write = doubles(operands, operand), operands.to_register(target)

    def run(mask: Mask) -> None:
        narrow = np.asarray(value().astype(np.float32))
        write(np.where(narrow != narrow, np.uint32(0x7FFFFFFF), narrow.view(np.uint32)), mask)

    return Operation(run, places(operand, wide=(0,)), result_places(target))


def to_integer(instruction: Instruction, operands: Operands) -> Operation:
    """``F2I`` with 64 bits on either side, saturated; NaN becomes the smallest number, or 0 without signs."""
    allow(instruction, "S64", "U64", "U32", "S32", "F64", "TRUNC", "FLOOR", "CEIL", "NTZ", "FTZ")
    target, operand = instruction.operands
    double = "F64" in instruction.modifiers
    value = doubles(operands, operand) if double else operands.floats(operand)
    sources, whole = places(operand, wide=(0,) if double else ()), whole_number(instruction)
    long = bool({"S64", "U64"} & set(instruction.modifiers))
    unsigned = bool({"U64", "U32"} & set(instruction.modifiers))
    bits = 64 if long else 32
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    kind: Any = _KINDS[long, unsigned]

    def compute() -> Any:
        number = np.asarray(whole(value().astype(np.float64)))
        inside = (number >= low) & (number < float(high + 1))
        result = np.where(inside, number, 0).astype(kind)
        result = np.where(number >= float(high + 1), kind(high), result)
        return np.where((number < low) | (number != number), kind(low), result)

    if long:
        return pair_result(instruction, operands, sources, compute)
    write = operands.to_register(target)
    return Operation(lambda mask: write(compute(), mask), sources, result_places(target))


def from_integer(instruction: Instruction, operands: Operands) -> Operation:
    """``I2F`` with 64 bits on either side."""
    allow(instruction, "F64", "S64", "U64", "U32", "S32", "RP", "RZ", "RM")
    target, operand = instruction.operands
    long = bool({"S64", "U64"} & set(instruction.modifiers))
    unsigned = bool({"U64", "U32"} & set(instruction.modifiers))
    read = operands.wide(operand) if long else operands.bits(operand)
    kind: Any = _KINDS[long, unsigned]
    sources = places(operand, wide=(0,) if long else ())
    if "F64" in instruction.modifiers:
        return pair_result(instruction, operands, sources, lambda: read().view(kind).astype(np.float64))
    write, mode = operands.to_register(target), rounding_of(instruction)

    def run(mask: Mask) -> None:
        number = read().view(kind)
        if mode == "RN":
            write(number.astype(np.float32), mask)
            return
        high = (number >> kind(11) << kind(11)).astype(np.float64)
        write(round_float(odd_sum(high, (number & kind(2047)).astype(np.float64)), mode), mask)

    return Operation(run, sources, result_places(target))


def upper_half_of_function(instruction: Instruction, operands: Operands) -> Operation:
    """``MUFU.RCP64H`` and ``.RSQ64H``: from the upper 32 bits of a float64 to those of the result."""
    target, operand = instruction.operands
    functions: dict[str, Callable[[Any], Any]] = {
        "RCP64H": lambda x: 1 / x,
        "RSQ64H": lambda x: 1 / np.sqrt(x),
    }
    if instruction.modifiers[0] not in functions:
        raise Unsupported("function")
    function = functions[instruction.modifiers[0]]
    upper, write = operands.bits(operand), operands.to_register(target)

    def run(mask: Mask) -> None:
        value = (np.asarray(upper()).astype(np.uint64) << np.uint64(32)).view(np.float64)
        result = np.asarray(function(value)).view(np.uint64) >> np.uint64(32)
        write(result.astype(np.uint32), mask)

    return Operation(run, places(operand), result_places(target))


DOUBLE: dict[str, Builder] = {"DADD": dadd, "DMUL": dmul, "DFMA": dfma, "DSETP": dsetp}


def with_64_bits(instruction: Instruction) -> Builder | None:
    """What converts to or from 64 bits, or looks up half of a float64, where an instruction does."""
    modifiers = set(instruction.modifiers)
    if instruction.opcode == "F2F" and "F64" in modifiers:
        return widened if instruction.modifiers[0] == "F64" else narrowed
    if instruction.opcode == "F2I" and modifiers & {"F64", "S64", "U64"}:
        return to_integer
    if instruction.opcode == "I2F" and modifiers & {"F64", "S64", "U64"}:
        return from_integer
    if instruction.opcode == "MUFU" and modifiers & {"RCP64H", "RSQ64H"}:
        return upper_half_of_function
    return None
