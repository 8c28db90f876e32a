"""Integer arithmetic: 32 bits that wrap, pairs of registers, carries in predicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from page4.experiments.sm70.assembly import (
    ZERO_REGISTER,
    Constant,
    Immediate,
    Instruction,
    Operand,
    Predicate,
    Register,
)

from .operands import Operands, Reader, places
from .operation import (
    Builder,
    Mask,
    Operation,
    Unsupported,
    allow,
    one_result,
    result_places,
    split_results,
    upwards,
)

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
    "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip
COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "AND": np.logical_and,
    "OR": np.logical_or,
    "XOR": np.logical_xor,
}


def _low(value: Any) -> Any:
    return (value & _LOW).astype(np.uint32)


def _high(value: Any) -> Any:
    return (value >> _32).astype(np.uint32)


def _term(operands: Operands, operand: Operand) -> Reader:
    """A summand with 64 bits: ``-x`` is ``~x + 1``, so that a difference carries where it does not borrow."""
    if getattr(operand, "negate", False):
        inverse = operands.bits(_inverse(operand))
        return lambda: inverse().astype(np.uint64) + np.uint64(1)
    bits = operands.bits(operand)
    return lambda: bits().astype(np.uint64)


def _inverse(operand: Operand) -> Operand:
    assert isinstance(operand, (Register, Constant))
    return replace(operand, negate=False, invert=True)


def iadd3(instruction: Instruction, operands: Operands) -> Operation:
    """``a + b + c``, and two predicates that count the carries; ``.X`` adds two predicates."""
    allow(instruction, "X")
    target, carries, sources = split_results(instruction.operands)
    values, carried = sources[:3], sources[3:]
    if any(not isinstance(operand, Predicate) for operand in carried):
        raise Unsupported("operands")
    write = operands.to_register(target)
    if not carries and not carried:
        a, b, c = (operands.bits(operand) for operand in values)
        return one_result(instruction, operands, values, lambda: a() + b() + c(), upwards)
    terms = [_term(operands, operand) for operand in values]
    terms += [_count(operands.predicate(operand)) for operand in carried]
    write_carries = [operands.to_predicate(operand) for operand in carries]

    def run(mask: Mask) -> None:
        total = terms[0]()
        for term in terms[1:]:
            total = total + term()
        write(_low(total), mask)
        for number, write_carry in enumerate(write_carries, 1):
            write_carry(total >> _32 >= np.uint64(number), mask)

    return Operation(run, places(*sources), result_places(target, *carries))


def _count(predicate: Reader) -> Reader:
    return lambda: predicate().astype(np.uint64)


def imad(instruction: Instruction, operands: Operands) -> Operation:
    """``a * b + c``: the lower or upper 32 bits or, with ``.WIDE``, all 64.

    ``c`` is a register pair with ``.WIDE`` and ``.HI``. ``.MOV``, ``.SHL`` and ``.IADD`` say what the product
    is used for and change nothing.
    """
    allow(instruction, "WIDE", "HI", "U32", "X", "MOV", "SHL", "IADD")
    _, carries, sources = split_results(instruction.operands)
    modifiers = set(instruction.modifiers)
    values, carried = sources[:3], sources[3:]
    carry = [operands.predicate(operand) for operand in carried]
    if modifiers & {"WIDE", "HI"}:
        return _wide_imad(instruction, operands)
    if carries:
        raise Unsupported("a carry of 32 bits")
    a, b, c = (operands.bits(operand) for operand in values)
    if carry:
        add = carry[0]
        return one_result(instruction, operands, sources, lambda: a() * b() + c() + add().astype(np.uint32))
    if all(operand == Register(ZERO_REGISTER) for operand in values[:2]):
        return one_result(instruction, operands, values[2:], lambda: +c(), lambda bits: bits)
    factor = values[1]
    if isinstance(factor, Immediate) and values[2] == Register(ZERO_REGISTER):
        places_up = int(factor.value).bit_length() - 1
        if factor.value == 1 << places_up:
            by = np.uint32(places_up)
            return one_result(instruction, operands, values, lambda: a() << by, lambda bits: bits << by)
    return one_result(instruction, operands, values, lambda: a() * b() + c(), upwards)


def _wide_imad(instruction: Instruction, operands: Operands) -> Operation:
    target, carries, sources = split_results(instruction.operands)
    unsigned = "U32" in instruction.modifiers
    a, b = (operands.bits(operand) for operand in sources[:2])
    c = operands.wide(sources[2], signed=not unsigned)
    carry = [operands.predicate(operand) for operand in sources[3:]]
    only_high = "HI" in instruction.modifiers
    writes = [operands.to_register(target), *([] if only_high else [operands.to_register(target, 1)])]
    write_carries = [operands.to_predicate(operand) for operand in carries]

    def product() -> Any:
        if unsigned:
            return a().astype(np.uint64) * b().astype(np.uint64)
        return (a().view(np.int32).astype(np.int64) * b().view(np.int32).astype(np.int64)).view(np.uint64)

    def run(mask: Mask) -> None:
        addend = c()
        total = product() + addend
        over = total < addend
        for add in carry:
            total = total + add().astype(np.uint64)
            over = over | ((total == 0) & add())
        values = [_high(total)] if only_high else [_low(total), _high(total)]
        for write, value in zip(writes, values, strict=True):
            write(value, mask)
        for write_carry in write_carries:
            write_carry(over, mask)

    results = result_places(target, registers=len(writes)) + result_places(*carries)
    return Operation(run, places(*sources, wide=(2,)), results)


def lea(instruction: Instruction, operands: Operands) -> Operation:
    """``(a << shift) + b``; with ``.HI`` the upper 32 bits of ``c:a``, or of a's sign and a, are shifted."""
    allow(instruction, "HI", "X", "SX32")
    target, carries, sources = split_results(instruction.operands)
    a, b = operands.bits(sources[0]), operands.bits(sources[1])
    rest = list(sources[2:])
    above: Reader | None = None
    if "HI" in instruction.modifiers and "SX32" not in instruction.modifiers:
        above = operands.bits(rest.pop(0))
    shift = np.uint64(0)
    if rest and isinstance(rest[0], Immediate):
        shift = np.uint64(rest[0].value)
        rest.pop(0)
    carry = [operands.predicate(operand) for operand in rest]
    write, write_carries = operands.to_register(target), [operands.to_predicate(o) for o in carries]

    def shifted() -> Any:
        low = a().astype(np.uint64)
        if "SX32" in instruction.modifiers:
            low = a().view(np.int32).astype(np.int64).view(np.uint64)
        elif above:
            low = low | above().astype(np.uint64) << _32
        low = low << shift
        return low >> _32 if "HI" in instruction.modifiers else low & _LOW

    def run(mask: Mask) -> None:
        total = shifted() + b().astype(np.uint64)
        for add in carry:
            total = total + add().astype(np.uint64)
        write(_low(total), mask)
        for write_carry in write_carries:
            write_carry(total > _LOW, mask)

    return Operation(run, places(*sources), result_places(target, *carries))


def isetp(instruction: Instruction, operands: Operands) -> Operation:
    """``P = (a compare b) combine c`` and ``Q = not (a compare b) combine c``.

    ``.EX`` compares the upper halves of 64-bit numbers; the last predicate is the result of the lower ones.
    """
    modifiers = set(instruction.modifiers)
    allow(instruction, *_COMPARE, *COMBINE, "U32", "EX")
    kind = instruction.modifiers[0]
    compare = _COMPARE[kind]
    strict = _COMPARE.get(kind[0] + "T", compare)
    read = operands.bits if "U32" in modifiers else operands.signed
    first, second, *sources = instruction.operands
    a, b, combined = read(sources[0]), read(sources[1]), operands.predicate(sources[2])
    lower = operands.predicate(sources[3]) if "EX" in modifiers else None
    combine = COMBINE[next(name for name in COMBINE if name in modifiers)]
    write, write_other = operands.to_predicate(first), operands.to_predicate(second)
    both = second != Predicate(7)

    def run(mask: Mask) -> None:
        x, y = a(), b()
        if lower is None:
            result = compare(x, y)
        elif kind == "NE":
            result = (x != y) | lower()
        elif kind == "EQ":
            result = (x == y) & lower()
        else:
            result = strict(x, y) | ((x == y) & lower())
        other = combined()
        write(combine(result, other), mask)
        if both:
            write_other(combine(~result, other), mask)

    return Operation(run, places(*sources), result_places(first, second))


def imnmx(instruction: Instruction, operands: Operands) -> Operation:
    """The smaller number where the predicate holds, else the larger one."""
    allow(instruction, "U32")
    _, *sources = instruction.operands
    read = operands.bits if "U32" in instruction.modifiers else operands.signed
    a, b, smaller = read(sources[0]), read(sources[1]), operands.predicate(sources[2])

    def compute() -> Any:
        x, y = a(), b()
        return np.where(smaller(), np.minimum(x, y), np.maximum(x, y))

    return one_result(instruction, operands, tuple(sources), compute)


def iabs(instruction: Instruction, operands: Operands) -> Operation:
    """Absolute value; that of the smallest number wraps to itself."""
    allow(instruction)
    value = operands.signed(instruction.operands[1])
    return one_result(instruction, operands, instruction.operands[1:], lambda: np.abs(value()))


def popc(instruction: Instruction, operands: Operands) -> Operation:
    """Number of ones."""
    allow(instruction)
    value = operands.bits(instruction.operands[1])
    return one_result(
        instruction, operands, instruction.operands[1:], lambda: np.bitwise_count(value()).astype(np.uint32)
    )


def flo(instruction: Instruction, operands: Operands) -> Operation:
    """Place of the highest one, or of the highest bit that differs from the sign; ``.SH`` counts from above.

    Without such a bit the result is -1.
    """
    allow(instruction, "U32", "SH")
    unsigned, from_above = "U32" in instruction.modifiers, "SH" in instruction.modifiers
    value = operands.bits(instruction.operands[1])

    def compute() -> Any:
        bits = np.asarray(value())
        if not unsigned:
            bits = np.where(bits >> np.uint32(31) != 0, ~bits, bits)
        place = np.frexp(bits.astype(np.float64))[1] - 1  # exact: float64 holds 32 bits
        place = 31 - place if from_above else place
        return np.where(bits == 0, -1, place).astype(np.int32)

    return one_result(instruction, operands, instruction.operands[1:], compute)


INTEGER: dict[str, Builder] = {
    "IADD3": iadd3,
    "IMAD": imad,
    "LEA": lea,
    "ISETP": isetp,
    "IMNMX": imnmx,
    "IABS": iabs,
    "POPC": popc,
    "FLO": flo,
}
