"""A rule's scale is the least that clips no more than it may, or the one with the least error."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from page4.kernels.codecs import decode_kv, encode_kv
from page4.kernels.errors import InputError
from page4.kvcache import get_format, scale_for_maximum
from page4.kvcache.magnitudes import Magnitudes
from page4.kvcache.scale_rules import choose_scale, relative_rms_error, rms_error

E4M3 = get_format("e4m3")


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    """Gaussian FP16 values with one outlier of 40 standard deviations."""
    x = torch.randn(4000, 2, 8, generator=torch.Generator().manual_seed(1))
    x[7, 1, 3] = -40.0
    return x.half()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m4"])
def test_max_is_the_least_scale_that_clips_nothing(x: torch.Tensor, name: str) -> None:
    kv_format, observed = get_format(name), Magnitudes.of(x)
    scale = choose_scale(observed, kv_format)
    assert scale == scale_for_maximum(40.0, kv_format.max_value)
    assert observed.share_above(scale * kv_format.max_value) == 0


def test_a_percentile_clips_what_lies_beyond_it(x: torch.Tensor) -> None:
    observed = Magnitudes.of(x)
    scale = choose_scale(observed, E4M3, "percentile", 99.9)
    assert scale == scale_for_maximum(observed.percentile(99.9), 448.0)
    assert 0 < observed.share_above(448 * scale) <= 0.001
    assert choose_scale(observed, E4M3, "percentile", 100) == choose_scale(observed, E4M3, "max")


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m4"])
def test_the_error_is_that_of_a_round_trip(x: torch.Tensor, name: str) -> None:
    for scale in (0.001, 0.05, 3.0):
        stored = decode_kv(encode_kv(x.float(), name, scale), name).double() * scale
        expected = float(((stored - x.double()) ** 2).mean().sqrt() / (x.double() ** 2).mean().sqrt())
        assert relative_rms_error(Magnitudes.of(x), get_format(name), scale) == pytest.approx(
            expected, rel=1e-9
        )
        absolute = float(((stored - x.double()) ** 2).mean().sqrt())
        assert rms_error(Magnitudes.of(x), get_format(name), scale) == pytest.approx(absolute, rel=1e-9)


@pytest.mark.parametrize("name", ["e4m3", "e3m4"])
def test_mse_has_the_least_error(x: torch.Tensor, name: str) -> None:
    kv_format, observed = get_format(name), Magnitudes.of(x)
    largest = choose_scale(observed, kv_format)
    best = choose_scale(observed, kv_format, "mse")
    for factor in np.linspace(0.02, 2, 67):
        error = relative_rms_error(observed, kv_format, largest * factor)
        assert relative_rms_error(observed, kv_format, best) <= error * 1.002
    if name == "e4m3":
        assert relative_rms_error(observed, kv_format, best) < relative_rms_error(
            observed, kv_format, largest
        )


def test_64_times_the_scale_changes_nothing_and_a_little_less_clips() -> None:
    """E4M3's error does not know its scale: an octave more flushes small values, an octave less clips."""
    x = torch.randn(20000, 2, 8, generator=torch.Generator().manual_seed(2)).half()
    observed = Magnitudes.of(x)
    scale = choose_scale(observed, E4M3)
    right = relative_rms_error(observed, E4M3, scale)
    assert 0.026 < right < 0.027
    for octave in range(1, 7):
        assert observed.share_above(448 * scale * 2.0**octave) == 0
        assert relative_rms_error(observed, E4M3, scale * 2.0**octave) == pytest.approx(right, rel=0.02)
    clipped = [observed.share_above(448 * scale * 2.0**-octave) for octave in range(7)]
    errors = [relative_rms_error(observed, E4M3, scale * 2.0**-octave) for octave in range(7)]
    assert clipped[0] == 0 and all(more > less for less, more in itertools.pairwise(clipped))
    assert errors[1] > 1.01 * right and errors[6] > 0.5


def test_unusable_input_is_refused(x: torch.Tensor) -> None:
    observed = Magnitudes.of(x)
    with pytest.raises(InputError, match="scale rule 'best' is unknown"):
        choose_scale(observed, E4M3, "best")  # type: ignore[arg-type]
    for percent in (0, -1, 100.1, float("nan")):
        with pytest.raises(InputError, match="the percentile is"):
            choose_scale(observed, E4M3, "percentile", percent)
    with pytest.raises(InputError, match="cannot calibrate from a maximum of 0"):
        choose_scale(Magnitudes.of(torch.zeros(3, 1, 4).half()), E4M3)
