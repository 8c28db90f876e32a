"""Static scales fail closed, and a calibrated one is the smallest that clips nothing."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from page4.kernels.codecs import decode_e4m3, encode_e4m3
from page4.kernels.errors import InputError
from page4.kvcache import FORMAT_NAMES, ScalePair, get_format, scale_for_maximum

UNUSABLE = [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 1e-50, 1e-40]


@pytest.mark.parametrize("value", UNUSABLE)
def test_a_scale_that_is_no_positive_normal_fp32_number_is_refused(value: float) -> None:
    """1e-50 is above 0 as a double and 0 in FP32; a subnormal scale would lose its precision."""
    for pair, name in (
        (lambda: ScalePair(value, 1.0), "k_scale"),
        (lambda: ScalePair(1.0, value), "v_scale"),
    ):
        with pytest.raises(InputError, match=name):
            pair()


@pytest.mark.parametrize("maximum", [0.0, -1.0, math.nan, math.inf, 1e300, 1e-40])
def test_no_scale_comes_of_a_maximum_without_information(maximum: float) -> None:
    with pytest.raises(InputError):
        scale_for_maximum(maximum, 448.0)


positive = st.floats(min_value=1e-30, max_value=1e30)
format_maximum = st.sampled_from([get_format(name).max_value for name in ("fp16", "e4m3")])


@given(positive, format_maximum)
def test_the_scale_is_the_least_fp32_number_that_covers_the_maximum(maximum: float, largest: float) -> None:
    scale = scale_for_maximum(maximum, largest)
    below = float(np.nextafter(np.float32(scale), np.float32(0)))
    assert scale == float(np.float32(scale))
    assert Fraction(scale) * Fraction(largest) >= Fraction(maximum) > Fraction(below) * Fraction(largest)


@given(st.floats(min_value=2.0**-20, max_value=2.0**20, width=32))
def test_nothing_saturates_and_the_maximum_keeps_its_precision(maximum: float) -> None:
    scale = scale_for_maximum(maximum, 448.0)
    stored = decode_e4m3(encode_e4m3(torch.tensor([maximum, -maximum]), scale))
    assert stored.tolist() == [448.0, -448.0]
    assert abs(448.0 * scale - maximum) <= 2**-22 * maximum


def test_every_format_has_a_finite_maximum_to_calibrate_against() -> None:
    for name in FORMAT_NAMES:
        assert 1 < get_format(name).max_value < math.inf
