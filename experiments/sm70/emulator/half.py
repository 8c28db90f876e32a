"""FP16 arithmetic on pairs of halves, and conversions.

Sums and products of two halves are computed in float32, where rounding twice changes nothing (24 bits are
more than twice 11 and 2); ``HFMA2`` rounds to odd in float64 first. A NaN is 0x7fff.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from page4.experiments.sm70.assembly import Constant, Immediate, Instruction, Operand, Predicate, Register

from .floating import COMPARE
from .integer import COMBINE
from .operands import Array, Operands, Reader, places
from .operation import Builder, Mask, Operation, Unsupported, allow, one_result, result_places
from .rounding import HALF_NAN, canonical, odd_sum

_HIDDEN_SIGN = np.uint16(0x8000)


def pairs(operands: Operands, operand: Operand) -> Reader:
    """Reads ``[..., 2]`` float16, the lower half first, or ``[..., 1]`` for both; with modifiers.

    A register with the selector ``F32`` is one float32 for both.
    """
    if isinstance(operand, Register):
        row = operands.threads.registers[operand.number].view(np.float16).reshape(-1, 2)
        if operand.selector == "F32":
            row = operands.threads.registers[operand.number].view(np.float32).reshape(-1, 1)

        def plain() -> Any:
            return row

    elif isinstance(operand, Constant):
        fixed = np.array([operands.constant(operand)]).view(np.float16)

        def plain() -> Any:
            return fixed

    else:
        raise Unsupported(f"operand {operand}")
    parts = operand.selector.split(".")
    half = {"H0_H0": 0, "H1_H1": 1}.get(parts[0])
    if parts[0] not in ("", "H0_H0", "H1_H1", "F32"):
        raise Unsupported(f"selector {operand.selector}")

    def read() -> Any:
        value = plain()
        if half is not None:
            value = value[..., half : half + 1]
        if operand.absolute:
            value = np.abs(value)
        return np.negative(value) if operand.negate else value

    return read


def _readers(operands: Operands, sources: tuple[Operand, ...]) -> list[Reader]:
    """Readers of pairs; two immediates that follow each other are one pair, the upper half first."""
    readers: list[Reader] = []
    rest = list(sources)
    while rest:
        operand = rest.pop(0)
        if isinstance(operand, Immediate):
            lower = rest.pop(0)
            assert isinstance(lower, Immediate)
            fixed = np.array([lower.value, operand.value], np.float16)
            readers.append(_constant_pair(fixed))
        elif not isinstance(operand, Predicate):
            readers.append(pairs(operands, operand))
    return readers


def _constant_pair(pair: Array) -> Reader:
    return lambda: pair


def _packed(operands: Operands, value: Any) -> Array:
    """Pairs of halves as registers."""
    halves = np.asarray(value).astype(np.float16)
    wrong = halves != halves
    if wrong.any():
        halves = np.where(wrong, HALF_NAN, halves)
    everywhere = np.broadcast_to(halves, (operands.threads.count, 2))
    return np.ascontiguousarray(everywhere).view(np.uint32)[:, 0]


def _arithmetic(
    instruction: Instruction, operands: Operands, compute: Callable[..., Any], count: int
) -> Operation:
    allow(instruction, "F32", "MMA")
    sources = instruction.operands[1:]
    readers = _readers(operands, sources)
    if len(readers) != count:
        raise Unsupported("operands")
    if "F32" in instruction.modifiers:
        return one_result(
            instruction, operands, sources, lambda: canonical(_first_half(operands, compute, readers))
        )
    return one_result(
        instruction, operands, sources, lambda: _packed(operands, compute(*(read() for read in readers)))
    )


def _first_half(operands: Operands, compute: Callable[..., Any], readers: list[Reader]) -> Any:
    """The float32 result for lower halves."""
    value = np.asarray(compute(*(read()[..., :1] for read in readers)), np.float32)
    return np.broadcast_to(value[..., 0], operands.threads.count)


def hadd2(instruction: Instruction, operands: Operands) -> Operation:
    """``a + b``; ``.F32`` gives the float32 sum of lower halves. Adding -0 converts."""
    wide = any(isinstance(o, Register) and o.selector == "F32" for o in instruction.operands)
    kind = np.float64 if wide else np.float32
    return _arithmetic(instruction, operands, lambda a, b: np.add(a, b, dtype=kind), 2)


def hmul2(instruction: Instruction, operands: Operands) -> Operation:
    """``a * b``."""
    return _arithmetic(instruction, operands, lambda a, b: np.multiply(a, b, dtype=np.float32), 2)


def hfma2(instruction: Instruction, operands: Operands) -> Operation:
    """``a * b + c``, rounded once."""

    def compute(a: Any, b: Any, c: Any) -> Any:
        return odd_sum(np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64))

    return _arithmetic(instruction, operands, compute, 3)


def hsetp2(instruction: Instruction, operands: Operands) -> Operation:
    """Compares both halves: one predicate each, combined with a third one."""
    allow(instruction, *COMPARE, *COMBINE)
    first, second, *sources = instruction.operands
    a, b = _readers(operands, tuple(sources))
    chooser = next(operand for operand in sources if isinstance(operand, Predicate))
    combined = operands.predicate(chooser)
    compare = COMPARE[instruction.modifiers[0]]
    combine = COMBINE[next(name for name in COMBINE if name in instruction.modifiers)]
    writes = [operands.to_predicate(first), operands.to_predicate(second)]

    def run(mask: Mask) -> None:
        result = np.broadcast_to(compare(a(), b()), (operands.threads.count, 2))
        other = combined()
        for half, write in enumerate(writes):
            write(combine(result[:, half], other), mask)

    return Operation(run, places(*sources), result_places(first, second))


def f2f(instruction: Instruction, operands: Operands) -> Operation:
    """Between float32 and a half in the lower bits."""
    _, operand = instruction.operands
    if instruction.modifiers[:2] == ("F16", "F32"):
        allow(instruction, "F16", "F32", "RN")
        value = operands.floats(operand)

        def narrow() -> Any:
            half = np.asarray(value().astype(np.float16))
            half = np.where(half != half, HALF_NAN, half)
            return half.view(np.uint16).astype(np.uint32)

        return one_result(instruction, operands, (operand,), narrow)
    if instruction.modifiers[:2] == ("F32", "F16"):
        allow(instruction, "F16", "F32")
        halves = pairs(operands, operand)

        def widen() -> Any:
            return canonical(np.asarray(halves()[..., 0], np.float32))

        return one_result(instruction, operands, (operand,), widen)
    raise Unsupported("conversion")


HALF: dict[str, Builder] = {
    "HADD2": hadd2,
    "HMUL2": hmul2,
    "HFMA2": hfma2,
    "HSETP2": hsetp2,
    "F2F": f2f,
}
