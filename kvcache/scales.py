"""Static KV scales: one FP32 number per layer for K and one for V. They fail closed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from page4.kernels.errors import InputError


@dataclass(frozen=True)
class ScalePair:
    """Scales of one layer: ``stored = x / scale``, so ``x ~ stored * scale``.

    Raises:
        InputError: a scale is not a finite positive FP32 number.
    """

    k: float
    v: float

    def __post_init__(self) -> None:
        for name, value in (("k_scale", self.k), ("v_scale", self.v)):
            if not (math.isfinite(value) and value > 0 and math.isfinite(np.float32(value))):
                raise InputError(f"{name} is {value}, expected a finite number above 0")


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
    """Smallest FP32 scale that keeps ``maximum`` within the format: the least FP32 s with s * format_max >= max.

    Raises:
        InputError: the maximum is not finite, or nothing but zeros was observed.
    """
    if not math.isfinite(maximum) or maximum <= 0:
        raise InputError(f"cannot calibrate from a maximum of {maximum}, expected a finite number above 0")
    scale = np.float32(maximum / format_maximum)
    if float(scale) * format_maximum < maximum:
        scale = np.nextafter(scale, np.float32(np.inf))
    return float(scale)
