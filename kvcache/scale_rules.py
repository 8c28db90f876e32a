"""From observed magnitudes to a static scale: by their maximum, a percentile, or the least squared error."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from page4.kernels.codecs import decode_kv, encode_kv
from page4.kernels.errors import InputError

from .formats import KVFormat
from .magnitudes import Magnitudes
from .scales import scale_for_maximum

ScaleRule = Literal["max", "percentile", "mse"]

_STEPS_PER_OCTAVE = 32
_OCTAVES_BELOW, _OCTAVES_ABOVE = 6, 1


def choose_scale(
    observed: Magnitudes, kv_format: KVFormat, rule: ScaleRule = "max", percent: float = 99.99
) -> float:
    """The static FP32 scale of a layer's K or V.

    - ``max``: the least scale that clips nothing observed.
    - ``percentile``: the least one that clips nothing up to that percentile.
    - ``mse``: of the scales ``2^(i / 32)`` times that of ``max``, from 2^-6 to 2, the one with the least
      squared error of what was observed; of equals, the largest. A power of two leaves a rounding error as it
      is, so one octave above covers all that clips nothing.

    Args:
        percent: of ``percentile``, above 0 and up to 100.
    Raises:
        InputError: an unknown rule, a percentage out of range, or nothing but zeros observed.
    """
    if rule not in get_args(ScaleRule):
        raise InputError(f"scale rule {rule!r} is unknown, expected one of {', '.join(get_args(ScaleRule))}")
    if not 0 < percent <= 100:
        raise InputError(f"the percentile is {percent}, expected above 0 and at most 100")
    if rule == "percentile":
        return scale_for_maximum(observed.percentile(percent), kv_format.max_value)
    scale = scale_for_maximum(observed.maximum, kv_format.max_value)
    if rule == "max":
        return scale
    steps = range(_OCTAVES_ABOVE * _STEPS_PER_OCTAVE, -_OCTAVES_BELOW * _STEPS_PER_OCTAVE - 1, -1)
    candidates = [float(np.float32(scale * 2.0 ** (step / _STEPS_PER_OCTAVE))) for step in steps]
    values, counts = observed.occurring()
    return min(candidates, key=lambda candidate: _squared_error(values, counts, kv_format, candidate))


def rms_error(observed: Magnitudes, kv_format: KVFormat, scale: float) -> float:
    """RMS of what storing the observed values changes, in their own unit; 0 of nothing."""
    values, counts = observed.occurring()
    return math.sqrt(_squared_error(values, counts, kv_format, scale) / max(observed.total, 1))


def relative_rms_error(observed: Magnitudes, kv_format: KVFormat, scale: float) -> float:
    """RMS of what storing the observed values changes, over their own RMS; 0 where they are all zero."""
    values, counts = observed.occurring()
    power = float((counts * values**2).sum())
    return math.sqrt(_squared_error(values, counts, kv_format, scale) / power) if power else 0.0


def _squared_error(
    values: NDArray[np.float64], counts: NDArray[np.int64], kv_format: KVFormat, scale: float
) -> float:
    """Summed over the counts, of a round trip through the format."""
    codes = encode_kv(torch.from_numpy(values).float(), kv_format.name, scale)
    restored = decode_kv(codes, kv_format.name).double().numpy() * scale
    return float((counts * (restored - values) ** 2).sum())
