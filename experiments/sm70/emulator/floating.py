"""FP32 arithmetic and conversions.

Results are those of IEEE 754 with one rounding; a NaN is 0x7fffffff. ``MUFU`` is rounded from float64, so
within the errors that NVIDIA documents for its approximations (CUDA C++ Programming Guide, "Mathematical
functions"). Like them it takes subnormal arguments and results for 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from page4.experiments.sm70.assembly import Instruction, Predicate

from .bitwise import selection
from .integer import COMBINE
from .operands import Operands, flush_subnormal, places
from .operation import Builder, Mask, Operation, allow, one_result, result_places
from .rounding import canonical, fused, odd_sum, round_float

_ROUNDINGS = ("RN", "RZ", "RM", "RP")
_SCALES = {"D2": 0.5, "D4": 0.25, "D8": 0.125, "M2": 2.0, "M4": 4.0, "M8": 8.0}  # of a product
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal,
    "NE": lambda a, b: (a < b) | (a > b),
    "NUM": lambda a, b: (a == a) & (b == b),
    "NAN": lambda a, b: (a != a) | (b != b),
    "LTU": lambda a, b: ~(a >= b), "LEU": lambda a, b: ~(a > b), "GTU": lambda a, b: ~(a <= b),
    "GEU": lambda a, b: ~(a < b), "EQU": lambda a, b: ~((a < b) | (a > b)), "NEU": np.not_equal,
}  # fmt: skip


def rounding_of(instruction: Instruction) -> str:
    """RN, RZ, RM or RP."""
    return next((mode for mode in _ROUNDINGS if mode in instruction.modifiers), "RN")


def _finish(instruction: Instruction, value: Any) -> Any:
    """Apply ``.FTZ`` and ``.SAT`` to a result."""
    value = canonical(value)
    if "FTZ" in instruction.modifiers:
        value = flush_subnormal(value)
    if "SAT" in instruction.modifiers:
        value = np.where(value != value, np.float32(0), np.clip(value, np.float32(0), np.float32(1)))
    return value


def fadd(instruction: Instruction, operands: Operands) -> Operation:
    """``a + b``."""
    allow(instruction, "FTZ", "SAT", *_ROUNDINGS)
    sources = instruction.operands[1:3]
    a, b = (operands.floats(operand, flush="FTZ" in instruction.modifiers) for operand in sources)
    mode = rounding_of(instruction)
    if mode == "RN":
        return one_result(instruction, operands, sources, lambda: _finish(instruction, a() + b()))

    def compute() -> Any:
        total = odd_sum(np.float64(a()), np.float64(b()))
        return _finish(instruction, round_float(total, mode))

    return one_result(instruction, operands, sources, compute)


def fmul(instruction: Instruction, operands: Operands) -> Operation:
    """``a * b``, with a modifier times a power of two, rounded once."""
    allow(instruction, "FTZ", "SAT", *_ROUNDINGS, *_SCALES)
    sources = instruction.operands[1:3]
    a, b = (operands.floats(operand, flush="FTZ" in instruction.modifiers) for operand in sources)
    mode = rounding_of(instruction)
    scale = next((_SCALES[name] for name in instruction.modifiers if name in _SCALES), None)
    if mode == "RN" and scale is None:
        return one_result(instruction, operands, sources, lambda: _finish(instruction, a() * b()))

    def compute() -> Any:
        product = np.asarray(np.multiply(a(), b(), dtype=np.float64)) * (scale or 1.0)
        return _finish(instruction, round_float(product, mode))

    return one_result(instruction, operands, sources, compute)


def ffma(instruction: Instruction, operands: Operands) -> Operation:
    """``a * b + c``, rounded once."""
    allow(instruction, "FTZ", "SAT", *_ROUNDINGS)
    sources = instruction.operands[1:4]
    a, b, c = (operands.floats(operand, flush="FTZ" in instruction.modifiers) for operand in sources)
    mode = rounding_of(instruction)
    return one_result(
        instruction, operands, sources, lambda: _finish(instruction, fused(a(), b(), c(), mode))
    )


def fsel(instruction: Instruction, operands: Operands) -> Operation:
    """``a`` where the predicate holds, else ``b``."""
    allow(instruction, "FTZ")
    _, first, second, chooser = instruction.operands
    a, b = (operands.floats(operand, flush="FTZ" in instruction.modifiers) for operand in (first, second))
    return selection(instruction, operands, a, b, operands.predicate(chooser))


def fmnmx(instruction: Instruction, operands: Operands) -> Operation:
    """The smaller number where the predicate holds, else the larger one; -0 < +0, and NaN loses."""
    allow(instruction, "FTZ")
    sources = instruction.operands[1:4]
    a, b = (operands.floats(o, flush="FTZ" in instruction.modifiers) for o in sources[:2])
    smaller = operands.predicate(sources[2])

    def compute() -> Any:
        x, y = a(), b()
        take_x = np.where(smaller(), _order(x) < _order(y), _order(x) > _order(y))
        result = np.where((take_x & (x == x)) | (y != y), x, y)
        return canonical(result)

    return one_result(instruction, operands, sources, compute)


def _order(value: Any) -> Any:
    """Integers that are ordered like floats, with -0 before +0."""
    bits = value.view(np.int32)
    return bits ^ (bits >> np.int32(31) & np.int32(0x7FFFFFFF))


def fsetp(instruction: Instruction, operands: Operands) -> Operation:
    """``P = (a compare b) combine c`` and ``Q = not (a compare b) combine c``."""
    allow(instruction, *COMPARE, *COMBINE, "FTZ")
    first, second, *sources = instruction.operands
    a, b = (operands.floats(o, flush="FTZ" in instruction.modifiers) for o in sources[:2])
    compare = COMPARE[instruction.modifiers[0]]
    combine = COMBINE[next(name for name in COMBINE if name in instruction.modifiers)]
    combined = operands.predicate(sources[2])
    write, write_other = operands.to_predicate(first), operands.to_predicate(second)
    both = second != Predicate(7)

    def run(mask: Mask) -> None:
        result, other = compare(a(), b()), combined()
        write(combine(result, other), mask)
        if both:
            write_other(combine(~result, other), mask)

    return Operation(run, places(*sources), result_places(first, second))


def fchk(instruction: Instruction, operands: Operands) -> Operation:
    """Whether ``a / b`` needs the slow way: Newton's steps could leave the range of normal numbers.

    The exact bounds of the hardware are not documented; both ways give the same quotient.
    """
    allow(instruction, "DIVIDE")
    target, *sources = instruction.operands
    a, b = (operands.floats(operand) for operand in sources)
    write = operands.to_predicate(target)

    def run(mask: Mask) -> None:
        over, under = (value().view(np.uint32) >> np.uint32(23) & np.uint32(255) for value in (a, b))
        over, under = over.astype(np.int32), under.astype(np.int32)
        quotient = over - under
        slow = (over <= 24) | (over == 255) | (under <= 2) | (under >= 253)
        write(slow | (quotient > 125) | (quotient < -124), mask)

    return Operation(run, places(*sources), result_places(target))


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "RCP": lambda x: 1 / x,
    "RSQ": lambda x: 1 / np.sqrt(x),
    "SQRT": np.sqrt,
    "EX2": np.exp2,
    "LG2": np.log2,
    "SIN": lambda x: np.sin(2 * np.pi * x),
    "COS": lambda x: np.cos(2 * np.pi * x),
}


def mufu(instruction: Instruction, operands: Operands) -> Operation:
    """A function from tables; ``SIN`` and ``COS`` count in turns."""
    allow(instruction, *_FUNCTIONS)
    function = _FUNCTIONS[instruction.modifiers[0]]
    value = operands.floats(instruction.operands[1], flush=True)

    def compute() -> Any:
        exact = np.asarray(function(value().astype(np.float64)))
        return canonical(flush_subnormal(exact.astype(np.float32)))

    return one_result(instruction, operands, instruction.operands[1:2], compute)


def i2f(instruction: Instruction, operands: Operands) -> Operation:
    """An integer as float32."""
    allow(instruction, "U32", "S32", "RP", *_ROUNDINGS)
    operand = instruction.operands[1]
    value = operands.bits(operand) if "U32" in instruction.modifiers else operands.signed(operand)
    mode = rounding_of(instruction)
    return one_result(
        instruction, operands, (operand,), lambda: round_float(np.asarray(value().astype(np.float64)), mode)
    )


_TO_WHOLE: dict[str, Callable[[Any], Any]] = {
    "TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil, "ROUND": np.rint,
}  # fmt: skip


def whole_number(instruction: Instruction) -> Callable[[Any], Any]:
    """How an instruction makes numbers whole."""
    return _TO_WHOLE[next((name for name in _TO_WHOLE if name in instruction.modifiers), "ROUND")]


def f2i(instruction: Instruction, operands: Operands) -> Operation:
    """float32 as an integer, saturated; NaN becomes 0 or, as S32, 0x80000000."""
    allow(instruction, "U32", "S32", "NTZ", "FTZ", *_TO_WHOLE)
    unsigned, whole = "U32" in instruction.modifiers, whole_number(instruction)
    value = operands.floats(instruction.operands[1], flush="FTZ" in instruction.modifiers)
    low, high = (0, 2**32 - 1) if unsigned else (-(2**31), 2**31 - 1)

    def compute() -> Any:
        number = np.asarray(whole(value().astype(np.float64)))
        number = np.where(number != number, 0 if unsigned else low, np.clip(number, low, high))
        return number.astype(np.int64).astype(np.uint32 if unsigned else np.int32)

    return one_result(instruction, operands, instruction.operands[1:2], compute)


def frnd(instruction: Instruction, operands: Operands) -> Operation:
    """float32 rounded to a whole number."""
    allow(instruction, "FTZ", *_TO_WHOLE)
    whole = whole_number(instruction)
    value = operands.floats(instruction.operands[1], flush="FTZ" in instruction.modifiers)
    return one_result(instruction, operands, instruction.operands[1:2], lambda: canonical(whole(value())))


FLOATING: dict[str, Builder] = {
    "FADD": fadd, "FMUL": fmul, "FFMA": ffma, "FSEL": fsel, "FMNMX": fmnmx, "FSETP": fsetp, "FCHK": fchk,
    "MUFU": mufu, "I2F": i2f, "F2I": f2i, "FRND": frnd,
}  # fmt: skip
