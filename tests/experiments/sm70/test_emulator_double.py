from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from page4.experiments.sm70.emulator.double import fused

from .small_programs import Array, outputs

RNG = np.random.default_rng(0)
A, B, C = (RNG.standard_normal(32) * 2.0 ** RNG.integers(-60, 60, 32) for _ in range(3))
A[:4], B[:4] = [0.0, -0.0, math.inf, 1.5], [-0.0, 3.0, 2.0, -1.5]


def halves(x: Array) -> tuple[Array, Array]:
    """Lower and upper words, for R20 and R21 or what follows."""
    words = np.ascontiguousarray(x).view(np.uint32).reshape(-1, 2)
    return words[:, 0], words[:, 1]


def result(statement: str, *inputs: Array) -> Array:
    low, high = outputs(statement, *[half for x in inputs for half in halves(x)], count=2)
    return (low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)).view(np.float64)


def test_sums_products_and_comparisons() -> None:
    np.testing.assert_array_equal(result("DADD R40, R20, -R22", A, B), A - B)
    np.testing.assert_array_equal(result("DMUL R40, |R20|, R22", A, B), abs(A) * B)
    np.testing.assert_array_equal(result("DMUL R40, R20, 0.5", A), A / 2)
    (got,) = outputs("DSETP.LT.AND P0, P1, R20, R22, PT\nP2R R40, PR, RZ, 0x3", *halves(A), *halves(B))
    np.testing.assert_array_equal(got, np.where(A < B, 1, 2))
    up, down = (result(f"DMUL.{mode} R40, R20, R22", A, B)[4:] for mode in ("RP", "RM"))
    for a, b, above, below in zip(A[4:], B[4:], up, down, strict=True):
        assert Fraction(below) <= Fraction(a) * Fraction(b) <= Fraction(above)
        assert above == np.nextafter(below, math.inf)


numbers = st.floats(-1e100, 1e100).filter(lambda x: x == 0 or abs(x) > 1e-100)


@given(numbers, numbers, numbers)
@example(1 + 2.0**-52, 1 + 2.0**-52, -1.0)
@example(1 + 2.0**-27, 1 + 2.0**-27, 2.0**-120)
@settings(max_examples=200)
def test_fused_products_are_rounded_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assert fused(*(np.full(1, x) for x in (a, b, c)))[0] == float(exact)


def test_conversions() -> None:
    numbers = np.resize([1.5, -2.5, 1e10, -1e10, 3e19, math.nan, 0.1], 32)
    single = numbers.astype(np.float32)
    low, high = outputs("F2I.S64.F64.TRUNC R40, R20", *halves(numbers), count=2)
    got = (low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)).view(np.int64)
    assert got[:7].tolist() == [1, -2, 10**10, -(10**10), 2**63 - 1, -(2**63), 0]
    low, high = outputs("F2F.F64.F32 R40, R20", single, count=2)
    wide = (low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)).view(np.float64)
    np.testing.assert_array_equal(wide, single.astype(np.float64))
    (narrow,) = outputs("F2F.F32.F64 R40, R20", *halves(A))
    np.testing.assert_array_equal(narrow.view(np.float32), A.astype(np.float32))
    np.testing.assert_array_equal(
        result("I2F.F64.S64 R40, R20", got.view(np.float64)), got.astype(np.float64)
    )


def test_half_of_a_reciprocal() -> None:
    x = np.abs(A[3:]) + 1
    x = np.resize(x, 32)
    (upper,) = outputs("MUFU.RCP64H R40, R21", *halves(x))
    got = (upper.astype(np.uint64) << np.uint64(32)).view(np.float64)
    np.testing.assert_allclose(got, 1 / x, rtol=2.0**-18)
