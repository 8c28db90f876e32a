"""Bits, bytes and moves between registers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from page4.experiments.sm70.assembly import Immediate, Instruction, Operand, Predicate, Register, Special

from .operands import Array, Operands, Reader, places
from .operation import Builder, Mask, Operation, Unsupported, allow, one_result, result_places
from .undefined import ALL_BITS, PREDICATES


def _lookup(table: int, a: Any, b: Any, c: Any) -> Any:
    """A function of three bits from its truth table, for all bits at once."""
    known = {
        0xC0: lambda: a & b, 0xFC: lambda: a | b, 0x3C: lambda: a ^ b, 0xF8: lambda: a | (b & c),
        0xFE: lambda: a | b | c, 0x96: lambda: a ^ b ^ c, 0xEA: lambda: (a & b) | c, 0x80: lambda: a & b & c,
        0x30: lambda: a & ~b, 0x0C: lambda: ~a & b, 0x33: lambda: ~b, 0x0F: lambda: ~a,
    }  # fmt: skip
    if table in known:
        return known[table]()
    result = (a ^ a) & b & c  # zeros of the right shape
    for place in range(8):
        if table >> place & 1:
            result = result | ((a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c))
    return result


def lop3(instruction: Instruction, operands: Operands) -> Operation:
    """A function of three bits; a predicate tells whether any bit of the result is set."""
    allow(instruction, "LUT")
    given = instruction.operands
    test = given[0] if isinstance(given[0], Predicate) else None
    target, *sources = given[1:] if test else given
    values, table = sources[:3], sources[3]
    assert isinstance(table, Immediate)
    lut = int(table.value)
    a, b, c = (operands.bits(operand) for operand in values)
    also = operands.predicate(sources[4]) if test and len(sources) > 4 else None
    write = operands.to_register(target)
    write_test = operands.to_predicate(test) if test else None
    undefined, count = operands.threads.undefined, operands.threads.count

    def run(mask: Mask) -> None:
        result = _lookup(lut, a(), b(), c())
        write(result, mask)
        if write_test and also:
            write_test((result != 0) | also(), mask)

    def spread(mask: Mask) -> None:
        """Undefined is where the result depends on an undefined bit."""
        choices: list[tuple[Array, ...]] = []
        for value, operand in zip((a, b, c), values, strict=True):
            given = np.broadcast_to(value(), count)
            if isinstance(operand, Register) and undefined.anywhere[operand.number]:
                bits = undefined.bits[operand.number]
                choices.append((given & ~bits, given | bits))
            else:
                choices.append((given,))
        results = [_lookup(lut, *chosen) for chosen in product(*choices)]
        changes = np.bitwise_or.reduce(results) & ~np.bitwise_and.reduce(results)
        for place in result_places(target):
            undefined.set(place, changes, mask)
        for place in result_places(*([test] if test else [])):
            undefined.set(place, np.where(changes != 0, ALL_BITS, np.uint32(0)), mask)

    results = result_places(target, *([test] if test else []))
    return Operation(run, places(*values, *sources[4:]), results, spread)


def plop3(instruction: Instruction, operands: Operands) -> Operation:
    """Two functions of three predicates."""
    allow(instruction, "LUT")
    first, second, *sources = instruction.operands
    a, b, c = (operands.predicate(operand) for operand in sources[:3])
    tables = [int(operand.value) for operand in sources[3:5] if isinstance(operand, Immediate)]
    writes = [operands.to_predicate(first), operands.to_predicate(second)]

    def run(mask: Mask) -> None:
        x, y, z = a(), b(), c()
        results = [_lookup_bool(table, x, y, z) for table in tables]
        for write, result in zip(writes, results, strict=True):
            write(result, mask)

    return Operation(run, places(*sources[:3]), result_places(first, second))


def _lookup_bool(table: int, a: Any, b: Any, c: Any) -> Any:
    result = np.zeros(np.shape(a), bool)
    for place in range(8):
        if table >> place & 1:
            result |= (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
    return result


def shf(instruction: Instruction, operands: Operands) -> Operation:
    """Shift of the 64 bits ``high:low``, of which ``.HI`` takes the upper half and otherwise the lower one.

    ``.W`` takes the amount modulo the width of the type; without it, greater amounts shift everything out.
    """
    allow(instruction, "L", "R", "W", "HI", "U32", "S32", "U64", "S64")
    modifiers = set(instruction.modifiers)
    _, low_operand, amount_operand, high_operand = instruction.operands
    low, amount, high = (operands.bits(o) for o in (low_operand, amount_operand, high_operand))
    width = 64 if modifiers & {"U64", "S64"} else 32
    signed = bool(modifiers & {"S32", "S64"})
    upper, right = "HI" in modifiers, "R" in modifiers
    sources = (low_operand, amount_operand, high_operand)
    if isinstance(amount_operand, Immediate):
        fixed = int(amount_operand.value) & 0xFFFFFFFF
        fixed = fixed % width if "W" in modifiers else min(fixed, width)
        by = np.uint32(fixed)
        if fixed < 32 and right and upper:
            if signed:
                number = operands.signed(high_operand)
                return one_result(
                    instruction,
                    operands,
                    sources,
                    lambda: number() >> np.int32(fixed),
                    lambda bits: (bits.view(np.int32) >> np.int32(fixed)).view(np.uint32),
                )
            return one_result(instruction, operands, sources, lambda: high() >> by, lambda bits: bits >> by)
        if fixed < 32 and not right and not upper:
            return _shift_left(instruction, operands, low, fixed)

    def compute() -> Any:
        value = low().astype(np.uint64) | high().astype(np.uint64) << np.uint64(32)
        by = amount().astype(np.uint64)
        by = by % np.uint64(width) if "W" in modifiers else np.minimum(by, np.uint64(width))
        gone = by >= np.uint64(64)  # a shift by 64 is none of C's
        by = np.minimum(by, np.uint64(63))
        if right and signed:
            shifted = (value.view(np.int64) >> by.astype(np.int64)).view(np.uint64)  # by 63 is as good as 64
        else:
            shifted = np.where(gone, np.uint64(0), value >> by if right else value << by)
        return (shifted >> np.uint64(32) if upper else shifted & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return one_result(instruction, operands, sources, compute)


def _shift_left(instruction: Instruction, operands: Operands, low: Reader, by: int) -> Operation:
    return one_result(
        instruction,
        operands,
        (instruction.operands[1],),
        lambda: low() << np.uint32(by),
        lambda bits: bits << np.uint32(by),
    )


def sgxt(instruction: Instruction, operands: Operands) -> Operation:
    """The lower bits, extended by zeros or by their highest bit."""
    allow(instruction, "U32")
    _, operand, size = instruction.operands
    if not isinstance(size, Immediate):
        raise Unsupported("a width in a register")
    value, unsigned = operands.bits(operand), "U32" in instruction.modifiers
    unused = np.uint32(32 - min(int(size.value), 32))

    def compute() -> Any:
        if unused == 32:
            return value() & np.uint32(0)
        up = value() << unused
        return up >> unused if unsigned else up.view(np.int32) >> np.int32(unused)

    return one_result(instruction, operands, (operand,), compute)


def bmsk(instruction: Instruction, operands: Operands) -> Operation:
    """A run of ones from a place on; both numbers are clamped to 32."""
    allow(instruction, "C")
    start, size = (operands.bits(operand) for operand in instruction.operands[1:3])

    def compute() -> Any:
        low, many = (np.minimum(value(), np.uint32(32)).astype(np.uint64) for value in (start, size))
        ones = ((np.uint64(1) << many) - np.uint64(1)) << low
        return (ones & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return one_result(instruction, operands, instruction.operands[1:3], compute)


def brev(instruction: Instruction, operands: Operands) -> Operation:
    """Bits in reverse order."""
    allow(instruction)
    value = operands.bits(instruction.operands[1])

    def compute() -> Any:
        bits = np.atleast_1d(value())
        for by, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
            bits = (bits >> np.uint32(by) & np.uint32(mask)) | (bits & np.uint32(mask)) << np.uint32(by)
        return bits >> np.uint32(16) | bits << np.uint32(16)

    return one_result(instruction, operands, instruction.operands[1:], compute)


def prmt(instruction: Instruction, operands: Operands) -> Operation:
    """Four bytes chosen from the eight of two registers; bit 3 of a choice spreads the byte's sign."""
    allow(instruction)
    _, first, chooser, second = instruction.operands
    a, selector, b = (operands.bits(operand) for operand in (first, chooser, second))
    threads = operands.threads
    write = operands.to_register(instruction.operands[0])

    def eight_bytes(low: Any, high: Any) -> Array:
        both = np.empty((threads.count, 2), np.uint32)
        both[:, 0], both[:, 1] = low, high
        return both.view(np.uint8)

    def choices() -> Array:
        chosen = np.asarray(selector())[..., None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
        return chosen.astype(np.int64)  # [..., 4]

    def run(mask: Mask) -> None:
        source, chosen = eight_bytes(a(), b()), choices()
        choice = chosen & 7
        picked = source[:, choice] if choice.ndim == 1 else np.take_along_axis(source, choice, 1)
        signs = chosen & 8 != 0
        if signs.any():
            picked = np.where(signs, np.where(picked & 128, np.uint8(255), np.uint8(0)), picked)
        write(np.ascontiguousarray(picked).view(np.uint32)[:, 0], mask)

    def spread(mask: Mask) -> None:
        """Bytes carry with them whether they are undefined."""
        undefined = threads.undefined
        low, high = (
            undefined.bits[o.number] if isinstance(o, Register) else np.uint32(0) for o in (first, second)
        )
        chosen = np.broadcast_to(choices() & 7, (threads.count, 4))
        picked = np.take_along_axis(eight_bytes(low, high), chosen, 1)
        found = np.ascontiguousarray(picked).view(np.uint32)[:, 0]
        if isinstance(chooser, Register):
            found = np.where(undefined.bits[chooser.number] != 0, ALL_BITS, found)
        for result in result_places(instruction.operands[0]):
            undefined.set(result, found, mask)

    sources = places(first, chooser, second)
    return Operation(run, sources, result_places(instruction.operands[0]), spread)


def sel(instruction: Instruction, operands: Operands) -> Operation:
    """``a`` where the predicate holds, else ``b``."""
    allow(instruction)
    _, first, second, chooser = instruction.operands
    a, b, choose = operands.bits(first), operands.bits(second), operands.predicate(chooser)
    return selection(instruction, operands, a, b, choose)


def selection(
    instruction: Instruction, operands: Operands, a: Reader, b: Reader, choose: Reader
) -> Operation:
    """An operation that takes one of two values, and whether that one is defined."""
    _, first, second, chooser = instruction.operands
    write = operands.to_register(instruction.operands[0])
    undefined = operands.threads.undefined

    def spread(mask: Mask) -> None:
        one, other = (
            undefined.bits[o.number] if isinstance(o, Register) else np.uint32(0) for o in (first, second)
        )
        found = np.where(choose(), one, other)
        assert isinstance(chooser, Predicate)
        found = np.where(undefined.bits[PREDICATES + chooser.number] != 0, ALL_BITS, found)
        for result in result_places(instruction.operands[0]):
            undefined.set(result, found, mask)

    return Operation(
        lambda mask: write(np.where(choose(), a(), b()), mask),
        places(first, second, chooser),
        result_places(instruction.operands[0]),
        spread,
    )


def mov(instruction: Instruction, operands: Operands) -> Operation:
    """A copy."""
    allow(instruction, "32I")
    value = operands.bits(instruction.operands[1])
    return one_result(instruction, operands, instruction.operands[1:2], value, lambda bits: bits)


def cs2r(instruction: Instruction, operands: Operands) -> Operation:
    """A special register into one register, or with zeros above it into a pair."""
    allow(instruction, "32")
    target, source = instruction.operands
    value = _special(operands, source)
    pair = "32" not in instruction.modifiers
    write, write_above = operands.to_register(target), operands.to_register(target, int(pair))

    def run(mask: Mask) -> None:
        if pair:
            write_above(np.uint32(0), mask)
        write(value, mask)

    return Operation(run, (), result_places(target, registers=1 + pair))


def s2r(instruction: Instruction, operands: Operands) -> Operation:
    """A special register."""
    allow(instruction)
    value = _special(operands, instruction.operands[1])
    return one_result(instruction, operands, (), lambda: value)


def _special(operands: Operands, operand: Operand) -> Array:
    assert isinstance(operand, Special)
    try:
        return operands.threads.special(operand.name)
    except KeyError:
        raise Unsupported(f"special register {operand.name}") from None


def p2r(instruction: Instruction, operands: Operands) -> Operation:
    """Predicates as bits; bits outside of the mask come from a register."""
    allow(instruction)
    _, _, base_operand, mask_operand = instruction.operands
    if not isinstance(mask_operand, Immediate):
        raise Unsupported("a mask in a register")
    chosen, base = int(mask_operand.value) & 127, operands.bits(base_operand)
    predicates = operands.threads.predicates

    def compute() -> Any:
        bits = base() & np.uint32(~chosen & 0xFFFFFFFF)
        for number in range(7):
            if chosen >> number & 1:
                bits = bits | predicates[number].astype(np.uint32) << np.uint32(number)
        return bits

    read = tuple(Predicate(number) for number in range(7) if chosen >> number & 1)
    return one_result(instruction, operands, (base_operand, *read), compute)


def r2p(instruction: Instruction, operands: Operands) -> Operation:
    """Predicates from bits, those of a mask."""
    allow(instruction)
    _, operand, mask_operand = instruction.operands
    if not isinstance(mask_operand, Immediate):
        raise Unsupported("a mask in a register")
    chosen = [n for n in range(7) if int(mask_operand.value) >> n & 1]
    value = operands.bits(operand)
    writes = [(np.uint32(n), operands.to_predicate(Predicate(n))) for n in chosen]

    def run(mask: Mask) -> None:
        bits = value()
        for number, write in writes:
            write((bits >> number & np.uint32(1)).astype(bool), mask)

    return Operation(run, places(operand), tuple(PREDICATES + n for n in chosen))


BITWISE: dict[str, Builder] = {
    "LOP3": lop3, "PLOP3": plop3, "SHF": shf, "SGXT": sgxt, "BMSK": bmsk, "BREV": brev, "PRMT": prmt,
    "SEL": sel, "MOV": mov, "CS2R": cs2r, "S2R": s2r, "P2R": p2r, "R2P": r2p,
}  # fmt: skip
