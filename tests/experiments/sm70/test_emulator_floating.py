from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from page4.experiments.sm70.emulator.rounding import NAN, fused

from .small_programs import Array, floats, outputs, words

INF, QNAN = math.inf, math.nan
EDGES = [0.0, -0.0, 1.0, -1.5, 1e-45, -1e-40, 1.17549435e-38, 3.4e38, -3.4e38, INF, -INF, QNAN, 0.1, 7.0]
A, B = floats(np.repeat(EDGES, 3)[:32]), floats([*EDGES[::-1], 3.0])
C = floats([1.0, -1e-38, INF, 0.0, -0.0, 2.0**-149, 5.5])


def result(statement: str, *inputs: Array) -> Array:
    return outputs(statement, *inputs)[0].view(np.float32)


def assert_same(got: Array, expected: Array) -> None:
    """Equal bits, with arithmetic's own NaN."""
    expected = np.where(np.isnan(expected), NAN, expected.astype(np.float32))
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def exact(value: Fraction, mode: str = "RN") -> np.float32:
    """A number as float32, rounded once."""
    near = np.float32(float(value))  # rounded twice: off by one place at most
    with np.errstate(over="ignore"):
        around = [np.nextafter(near, np.float32(-INF)), near, np.nextafter(near, np.float32(INF))]
    finite = [x for x in around if np.isfinite(x)]
    below = [x for x in finite if Fraction(float(x)) <= value]
    above = [x for x in finite if Fraction(float(x)) >= value]
    if mode == "RM" or (mode == "RZ" and value > 0):
        return max(below)
    if mode == "RP" or mode == "RZ":
        return min(above)
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - value), x.view(np.uint32) & 1))


@np.errstate(all="ignore")
def test_sums_and_products() -> None:
    assert_same(result("FADD R40, R20, R21", A, B), A + B)
    assert_same(result("FADD R40, -R20, |R21|", A, B), -A + np.abs(B))
    assert_same(result("FMUL R40, R20, R21", A, B), A * B)
    assert_same(result("FMUL R40, R20, 0.25", A), A * np.float32(0.25))
    wide = A.astype(np.float64) * B
    assert_same(result("FMUL.D4 R40, R20, R21", A, B), (wide / 4).astype(np.float32))
    assert_same(result("FMUL.M8 R40, R20, R21", A, B), (wide * 8).astype(np.float32))
    flushed = np.where(np.abs(A) < 2.0**-126, np.copysign(0, A), A).astype(np.float32)
    assert_same(result("FADD.FTZ R40, R20, -RZ", A), flushed + np.float32(-0.0))
    assert_same(result("FADD.SAT R40, R20, RZ", floats([-3, 0.25, 9, INF])), floats([0, 0.25, 1, 1]))


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(numbers, numbers, numbers)
@example(1 + 2.0**-23, 1 + 2.0**-23, 2.0**-60)  # rounding to float64 first gives a tie
@example(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80)
@example(2.0**-100, 2.0**-49, 2.0**-149)  # half of the smallest number away
@settings(max_examples=200)
def test_fused_products_are_rounded_once(a: float, b: float, c: float) -> None:
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value == 0 or abs(value) > Fraction(3.4e38) or abs(value) < Fraction(2.0**-149):
        return
    given_floats = [np.full(1, x, np.float32) for x in (a, b, c)]
    for mode in ("RN", "RZ", "RM", "RP"):
        assert fused(*given_floats, mode)[0] == exact(value, mode), mode


@np.errstate(all="ignore")
def test_fused_products_of_special_numbers() -> None:
    expected = (A.astype(np.float64) * B + C).astype(np.float32)
    assert_same(result("FFMA R40, R20, R21, R22", A, B, C), expected)
    assert_same(result("FFMA R40, R20, -R21, 1", A, B), (1 - A.astype(np.float64) * B).astype(np.float32))


def test_smaller_and_larger() -> None:
    a, b = floats([0.0, -0.0, QNAN, 1.0, QNAN, -2.0]), floats([-0.0, 0.0, 3.0, QNAN, QNAN, -3.0])
    assert_same(result("FMNMX R40, R20, R21, PT", a, b), floats([-0.0, -0.0, 3.0, 1.0, QNAN, -3.0]))
    assert_same(result("FMNMX R40, R20, R21, !PT", a, b), floats([0.0, 0.0, 3.0, 1.0, QNAN, -2.0]))
    assert_same(result("FMNMX R40, |R20|, 2, PT", a), np.fmin(np.abs(a), np.float32(2)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LT", A < B), ("LE", A <= B), ("GT", A > B), ("GE", A >= B), ("EQ", A == B),
        ("NE", (A < B) | (A > B)), ("LTU", ~(A >= B)), ("GEU", ~(A < B)), ("NEU", A != B),
        ("NUM", ~(np.isnan(A) | np.isnan(B))), ("NAN", np.isnan(A) | np.isnan(B)),
    ],
)  # fmt: skip
def test_comparisons(name: str, expected: Array) -> None:
    body = f"FSETP.{name}.AND P0, P1, R20, R21, PT\nP2R R40, PR, RZ, 0x3"
    (got,) = outputs(body, A, B)
    np.testing.assert_array_equal(got, expected + 2 * ~expected)


def test_selection_keeps_bits() -> None:
    bits = words([0x7F800001, 0xFFC12345])
    (got,) = outputs("FSEL R40, R20, +INF , PT", bits)
    np.testing.assert_array_equal(got, bits)
    (got,) = outputs("FSEL R40, R20, -QNAN , !PT", bits)
    assert np.isnan(got.view(np.float32)).all()


@np.errstate(all="ignore")
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("RCP", lambda x: 1 / x), ("RSQ", lambda x: 1 / np.sqrt(x)), ("SQRT", np.sqrt),
        ("EX2", np.exp2), ("LG2", np.log2),
    ],
)  # fmt: skip
def test_functions_are_within_two_places(name: str, function: np.ufunc) -> None:
    x = floats([0.5, 1.0, 1.7, 3.0, 100.25, 1e-30, 1e20, INF, 0.0, QNAN])
    got, exactly = result(f"MUFU.{name} R40, R20", x), function(x.astype(np.float64))
    normal = np.isfinite(exactly) & (np.abs(exactly) > 2.0**-126)
    np.testing.assert_allclose(got[normal], exactly[normal], rtol=2.0**-22, atol=2.0**-22)
    special = ~np.isfinite(exactly)
    assert_same(got[special], exactly[special].astype(np.float32))


def test_functions_take_subnormals_for_zero() -> None:
    assert_same(result("MUFU.RCP R40, R20", floats([1e-39, -1e-39])), floats([INF, -INF]))
    assert_same(result("MUFU.EX2 R40, R20", floats([-127.0])), floats([0.0]))


def test_integers_to_floats_and_back() -> None:
    integers = words([0, 1, -1, 2**31 - 1, -(2**31), 2**24 + 1, 2**32 - 1])
    assert_same(result("I2F R40, R20", integers), integers.view(np.int32).astype(np.float32))
    assert_same(result("I2F.U32 R40, R20", integers), integers.astype(np.float32))
    x = floats([1.5, -1.5, 2.5, 3e9, -3e9, QNAN, 1e10])
    (got,) = outputs("F2I.TRUNC.NTZ R40, R20", x)
    low, high = -(2**31), 2**31 - 1
    np.testing.assert_array_equal(got.view(np.int32)[:7], [1, -1, 2, high, low, low, high])
    (got,) = outputs("F2I.U32.TRUNC.NTZ R40, R20", x)
    np.testing.assert_array_equal(got[:7], [1, 0, 2, 3_000_000_000, 0, 0, 2**32 - 1])
    assert_same(result("FRND.FLOOR R40, R20", x), np.floor(x))


@np.errstate(all="ignore")
def test_the_fast_way_of_a_division_is_right_where_the_check_allows_it() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = (
            (rng.choice([-1, 1], 32) * 2.0 ** rng.uniform(-126, 127, 32)).astype(np.float32) for _ in range(2)
        )
        body = """
            MUFU.RCP R2, R21
            FCHK P0, R20, R21
            FFMA R3, R2, -R21, 1
            FFMA R3, R2, R3, R2
            FFMA R5, R20, R3, RZ
            FFMA R6, R5, -R21, R20
            FFMA R40, R3, R6, R5
            SEL R41, RZ, 0x1, P0
        """
        quotient, fast = outputs(body, a, b, count=2)
        assert fast.any()
        np.testing.assert_array_equal(quotient.view(np.float32)[fast == 1], (a / b)[fast == 1])
