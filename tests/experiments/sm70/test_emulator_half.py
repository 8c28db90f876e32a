from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from page4.experiments.sm70.emulator import run

from .small_programs import WARP, Array, floats, outputs, program

EDGES = [0.0, -0.0, 1.0, -1.5, 6e-8, -6.1e-5, 65504.0, math.inf, -math.inf, math.nan, 0.1, 2049.0]
RNG = np.random.default_rng(0)
A, B, C = (
    np.concatenate([RNG.permutation(EDGES), RNG.standard_normal(52)]).astype(np.float16) for _ in range(3)
)
LOW, HIGH = slice(0, None, 2), slice(1, None, 2)


def halves(statement: str, *inputs: Array) -> Array:
    return outputs(statement, *inputs)[0].view(np.float16)


def assert_same(got: Array, expected: Array) -> None:
    nan = np.uint16(0x7FFF).view(np.float16)
    with np.errstate(over="ignore"):
        expected = np.where(np.isnan(expected), nan, expected).astype(np.float16)
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


def exactly(function: Callable[..., Array], *inputs: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(function(*(x.astype(np.float64) for x in inputs)))


def test_pairs() -> None:
    assert_same(halves("HADD2 R40, R20, R21", A, B), exactly(np.add, A, B))
    assert_same(halves("HADD2 R40, -R20, |R21|", A, B), exactly(lambda a, b: abs(b) - a, A, B))
    assert_same(halves("HMUL2 R40, R20, R21", A, B), exactly(np.multiply, A, B))
    assert_same(halves("HFMA2 R40, R20, R21, R22", A, B, C), exactly(lambda a, b, c: a * b + c, A, B, C))
    assert_same(halves("HMUL2 R40, R20, 256, 0.5", A)[HIGH], exactly(lambda a: a * 256, A[HIGH]))
    assert_same(halves("HMUL2 R40, R20, 256, 0.5", A)[LOW], exactly(lambda a: a * 0.5, A[LOW]))


def test_halves_of_a_register() -> None:
    assert_same(halves("HADD2 R40, R20.H1_H1, R21", A, B)[LOW], exactly(np.add, A[HIGH], B[LOW]))
    (got,) = outputs("HADD2.F32 R40, R20.H1_H1, -RZ.H0_H0", A)
    number = ~np.isnan(A[HIGH])
    np.testing.assert_array_equal(got.view(np.float32)[number], A[HIGH].astype(np.float32)[number])


def test_a_fused_product_is_rounded_once() -> None:
    """In float64 first, the small summand would be lost and leave a tie, which goes down."""
    a, b = (np.full(64, x, np.float16) for x in (1 + 2.0**-10, 1 - 2.0**-10 + 2.0**-11))
    c = np.full(64, 6e-8, np.float16)
    exact = float(a[0]) * float(b[0]) + float(c[0])
    assert_same(halves("HFMA2 R40, R20, R21, R22", a, b, c), np.full(64, exact))


@np.errstate(over="ignore")
def test_conversions() -> None:
    x = floats([1.0, 65519.9, 65520.0, 2.0**-25, 2.0**-24, -math.inf, math.nan, 1 + 2.0**-11])
    (got,) = outputs("F2F.F16.F32 R40, R20", x)
    assert (got >> 16 == 0).all()
    assert_same(got.astype(np.uint16).view(np.float16), x)
    both = halves("HADD2 R40, R20.F32, -RZ.H0_H0", x)
    assert_same(both[LOW], x)
    assert_same(both[HIGH], x)
    (got,) = outputs("F2F.F32.F16 R40, R20", A)
    expected = A[LOW].astype(np.float32)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(got.view(np.float32)[number], expected[number])


def test_comparisons_of_both_halves() -> None:
    (got,) = outputs("HSETP2.LT.AND P0, P1, R20, R21, PT\nP2R R40, PR, RZ, 0x3", A, B)
    np.testing.assert_array_equal(got, (A[LOW] < B[LOW]) + 2 * (A[HIGH] < B[HIGH]))


# Layouts of mma.sync.m8n8k4 as the PTX ISA gives them, per lane: quad-pair, row or column, depth,
# accumulator.
LANE = np.arange(WARP)
QUAD_PAIR, INSIDE = LANE // 4 % 4, LANE % 4 + 4 * (LANE // 16)


def product_of_warp(row_a: bool, column_b: bool) -> tuple[Array, Array]:
    a, b = (
        RNG.standard_normal((4, 8, 4)).astype(np.float16) for _ in range(2)
    )  # [quad-pair, row or column, k]
    c = RNG.standard_normal((4, 8, 8)).astype(np.float32)

    def fragment(matrix: Array, whole: bool) -> Array:
        if whole:
            return matrix[QUAD_PAIR, INSIDE]  # a thread has a row of A or a column of B
        first = INSIDE // 4 * 4
        return np.stack([matrix[QUAD_PAIR, first + element, LANE % 4] for element in range(4)], 1)

    index = np.arange(8)
    row = (LANE[:, None] & 1) + (index & 2) + 4 * (LANE[:, None] // 16)
    column = (index & 4) + (LANE[:, None] & 2) + (index & 1)
    place = QUAD_PAIR[:, None], row, column
    fragments = [fragment(a, row_a).copy(), fragment(b, column_b).copy(), c[place].copy()]
    layout_a, layout_b = "ROW" if row_a else "COL", "COL" if column_b else "ROW"
    loads = "\n".join(
        f"SHF.L.U32 R6, R0, {shift:#x}, RZ\nIADD3 R2, P0, R6, c[0x0][{place:#x}], RZ\n"
        f"IMAD.X R3, RZ, RZ, c[0x0][{place + 4:#x}], P0\nLDG.E.{width}.SYS R{register}, [R2{offset}]"
        for shift, place, width, register, offset in (
            (3, 0x168, 64, 10, ""), (3, 0x170, 64, 12, ""), (5, 0x178, 128, 32, ""), (5, 0x178, 128, 36,
            "+0x10"),
        )
    )  # fmt: skip
    steps = "\n".join(
        f"HMMA.884.F32.F32.STEP{s} R{40 + 2 * s}, R10.{layout_a}, R12.{layout_b}, R{32 + 2 * s}"
        for s in range(4)
    )
    got = launch(loads + "\n" + steps, fragments)
    expected = np.einsum("qik,qjk->qij", a.astype(np.float64), b.astype(np.float64)) + c
    return got, expected[place]


def launch(body: str, fragments: list[Array]) -> Array:
    """Accumulators ``[32, 8]`` that a body leaves in R40 to R47."""
    result = np.zeros((WARP, 8), np.float32)
    store = """
        SHF.L.U32 R6, R0, 0x5, RZ
        IADD3 R2, P0, R6, c[0x0][0x160], RZ
        IMAD.X R3, RZ, RZ, c[0x0][0x164], P0
        STG.E.128.SYS [R2], R40
        STG.E.128.SYS [R2+0x10], R44
        EXIT
    """
    run(
        program("S2R R0, SR_TID.X\n" + body + store), grid=(1, 1, 1), warps=1, arguments=[result, *fragments],
        shared_bytes=0,
    )  # fmt: skip
    return result


@pytest.mark.parametrize("row_a", [True, False])
@pytest.mark.parametrize("column_b", [True, False])
def test_tensor_cores_multiply_quad_pairs(row_a: bool, column_b: bool) -> None:
    got, expected = product_of_warp(row_a, column_b)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
