"""Static KV scales: one FP32 number per layer for K and one for V. They fail closed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from page4.kernels.codecs import check_scale
from page4.kernels.errors import InputError


@dataclass(frozen=True)
class ScalePair:
    """Scales of one layer: ``stored = x / scale``, so ``x ~ stored * scale``.

    Raises:
        InputError: a scale is not a positive, finite, normal FP32 number.
    """

    k: float
    v: float

    def __post_init__(self) -> None:
        check_scale(self.k, "k_scale")
        check_scale(self.v, "v_scale")


UNIT_SCALES = ScalePair(1.0, 1.0)


@dataclass(frozen=True)
class KVScales:
    """Scales of the target's QSA layers, in layer order, and of the draft layer.

    Attributes:
        target: one pair per QSA layer.
        draft: the MTP layer's pair, or None when it has none (then its format must need none).
    """

    target: tuple[ScalePair, ...]
    draft: ScalePair | None = None


def scale_for_maximum(maximum: float, format_maximum: float) -> float:
    """Smallest FP32 scale that keeps ``maximum`` in the format: the least s with ``s * format_max >= max``.

    Raises:
        InputError: the maximum is not finite, nothing but zeros was observed, or the scale is no normal FP32
            number.
    """
    if not math.isfinite(maximum) or maximum <= 0:
        raise InputError(f"cannot calibrate from a maximum of {maximum}, expected a finite number above 0")
    quotient = maximum / format_maximum
    check_scale(quotient, f"the scale of a maximum of {maximum}")
    scale = np.float32(quotient)
    if float(scale) * format_maximum < maximum:
        scale = np.nextafter(scale, np.float32(np.inf))
    return float(scale)
