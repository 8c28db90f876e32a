"""Theory against the codecs: what rounding is expected to cost is what it costs."""

from __future__ import annotations

import math

import pytest
import torch

from page4.experiments.quant_error.theory import (
    expected_squared_error,
    is_subnormal,
    rounding_error,
    saturates,
)
from page4.kernels.codecs import decode_int8, decode_kv, encode_int8_rows, encode_kv

FLOATS = {"fp16": 10, "e4m3": 3, "e5m2": 2, "e3m4": 4}


def restored(x: torch.Tensor, kv_format: str, scale: float) -> torch.Tensor:
    if kv_format == "int8":
        codes, scales = encode_int8_rows(x)
        return decode_int8(codes).double() * scales.double().unsqueeze(-1)
    return decode_kv(encode_kv(x, kv_format, scale), kv_format).double() * scale


def assert_mean_within_five_sigma(values: torch.Tensor, expected: float, allowance: float = 0.0) -> None:
    """Of independent values; the standard error of their mean is their own."""
    sigma = float(values.std()) / math.sqrt(values.numel())
    assert abs(float(values.mean()) - expected) < 5 * sigma + allowance


@pytest.mark.parametrize("kv_format", FLOATS)
def test_normal_values_lose_what_their_mantissa_bits_say(kv_format: str) -> None:
    """Whatever the values are: here 0.3 throughout, under scales that are uniform in their logarithm.

    The allowance is the next term. With h half a step at 1, the half cells beside powers of two take 2 h^2
    away from the leading term, 2^(-2m - 1) of it, and the curvature of the others gives some of that back.
    """
    generator = torch.Generator().manual_seed(1)
    # FP16 has no scale, so there the value takes its place.
    x = 0.3 * torch.exp2(torch.rand(200_000, generator=generator, dtype=torch.float64)).float()
    error = (restored(x, kv_format, 2.0**-4 if kv_format != "fp16" else 1.0) / x.double() - 1).square()
    theory, bits = rounding_error(kv_format), FLOATS[kv_format]
    assert theory == pytest.approx(2.0**-bits * 0.2123, rel=1e-3)
    assert_mean_within_five_sigma(error, theory**2, allowance=theory**2 * 2.0 ** (-2 * bits - 1))


def test_e4m3_loses_2_65_percent_and_int8_has_no_such_number() -> None:
    assert rounding_error("e4m3") == pytest.approx(0.0265, abs=5e-5)
    assert rounding_error("int8") is None


@pytest.mark.parametrize("kv_format", [*FLOATS, "int8"])
def test_expected_error_is_that_of_random_values(kv_format: str) -> None:
    x = torch.randn(4_000, 2, 32, generator=torch.Generator().manual_seed(2))
    scale = 1.0 if kv_format in ("fp16", "int8") else 0.011
    expected = expected_squared_error(x, kv_format, scale)
    error = (restored(x, kv_format, scale) - x.double()).square()
    kept = ~saturates(x, kv_format, scale)
    if kv_format == "int8":
        kept = x.abs() < x.abs().amax(-1, keepdim=True)  # each row's largest value is stored as it is
    assert_mean_within_five_sigma((error - expected)[kept], 0.0)


@pytest.mark.parametrize("kv_format", ["e4m3", "e3m4", "e5m2"])
def test_saturation_and_underflow_are_exact(kv_format: str) -> None:
    scale = 0.5
    codes = torch.tensor([0x7B if kv_format == "e5m2" else 0x7E, 1], dtype=torch.uint8)
    largest, step = decode_kv(codes, kv_format).tolist()
    x = torch.tensor([scale * largest * 1.5, -scale * largest * 7, scale * step * 0.49, 0.0])
    error = (restored(x, kv_format, scale) - x.double()).square()
    assert torch.allclose(expected_squared_error(x, kv_format, scale), error, rtol=1e-12, atol=0)
    assert saturates(x, kv_format, scale).tolist() == [True, True, False, False]
    assert is_subnormal(x, kv_format, scale).tolist() == [False, False, True, True]


def test_subnormal_values_have_one_step() -> None:
    """The floor: below 2^-6 scales e4m3 counts in steps of 2^-9 scales."""
    x = torch.tensor([2.0**-6, 2.0**-7, 2.0**-8]) * 0.9
    assert torch.equal(
        expected_squared_error(x, "e4m3", 1.0), torch.full((3,), 2.0**-18 / 12, dtype=torch.float64)
    )


def test_a_format_that_the_values_are_in_changes_nothing() -> None:
    x = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(3))
    assert not expected_squared_error(x.half(), "fp16", 1.0).any()
    assert not expected_squared_error(x, "fp32", 1.0).any()
    assert expected_squared_error(x, "fp16", 1.0).all()
