"""What rounding to a format costs, from the format alone and from the values that are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.codecs import BYTE_FLOATS, INT8_MAX, STORAGE_DTYPES


@dataclass(frozen=True)
class FloatGrid:
    """The numbers that a floating-point format stores.

    Attributes:
        mantissa_bits: Bits after the leading one.
        smallest_normal: Values below it are multiples of a fixed step.
        max_value: Values beyond it saturate.
    """

    mantissa_bits: int
    smallest_normal: float
    max_value: float


def float_grid(kv_format: str) -> FloatGrid | None:
    """The grid of a format; None of `int8`, whose step depends on the row."""
    if kv_format in BYTE_FLOATS:
        spec = BYTE_FLOATS[kv_format]
        return FloatGrid(spec.mantissa_bits, spec.smallest_normal, spec.max_value)
    dtype = STORAGE_DTYPES[kv_format]
    if not dtype.is_floating_point:
        return None
    info = torch.finfo(dtype)
    return FloatGrid(-int(math.log2(info.eps)), info.smallest_normal, info.max)


def rounding_error(kv_format: str) -> float | None:
    """RMS of the relative rounding error of a normal value: `2^-m / sqrt(32 ln 2)` for m mantissa bits.

    A value `f 2^e`, 1 <= f < 2, is rounded to a multiple of `d = 2^(e - m)`. With an error that is uniform
    its mean square is `d^2 / 12`, or `2^(-2m) / (12 f^2)` of the value's. Averaged over a mantissa f that is
    uniform in its logarithm, as that of `x / scale` is over scales, `E[1 / f^2] = 3 / (8 ln 2)`. What the
    values are does not matter, and neither does the scale. It is the leading term: that errors are not quite
    uniform next to a power of two lowers the mean square by up to `2^(-2m - 1)` of itself.

    None of `int8`, whose error depends on the spread of its rows.
    """
    grid = float_grid(kv_format)
    return None if grid is None else 2.0**-grid.mantissa_bits / math.sqrt(32 * math.log(2))


def expected_squared_error(x: Tensor, kv_format: str, scale: float) -> Tensor:
    """Mean square of what storing each value should change, if rounding errors are uniform in their step.

    A float format has steps that grow with the value down to the smallest normal one, where they stay as they
    are (the subnormal floor); below half a step a value becomes zero, and beyond the largest value it
    saturates: both lose what they lose for certain. `int8` has one step per row, `max|x| / 127`. A format
    that is the values' own dtype changes nothing.

    Shapes: `[..., D]`, a row per token and KV head; returns float64 of the same shape.
    """
    wide = x.double()
    if x.dtype == STORAGE_DTYPES[kv_format]:
        return torch.zeros_like(wide)
    grid = float_grid(kv_format)
    if grid is None:
        step = wide.abs().amax(-1, keepdim=True) / INT8_MAX
        return (step.square() / 12).expand_as(wide)
    magnitude = wide.abs() / scale
    normal = magnitude.clamp_min(grid.smallest_normal)
    significand = torch.frexp(normal).mantissa  # 0.5 to 1, so their quotient is the power of two above
    step = normal / significand * 2.0 ** (-1 - grid.mantissa_bits)
    lost = (magnitude - grid.max_value).clamp_min(0)
    error = torch.where(lost > 0, lost.square(), step.square() / 12)
    return torch.where(magnitude < step / 2, magnitude.square(), error) * scale**2


def saturates(x: Tensor, kv_format: str, scale: float) -> Tensor:
    """Which values lie beyond the format's largest one; none does in `int8`. Returns bool of the shape."""
    grid = float_grid(kv_format)
    return _nowhere(x) if grid is None else x.double().abs() / scale > grid.max_value


def is_subnormal(x: Tensor, kv_format: str, scale: float) -> Tensor:
    """Which values lie below the format's smallest normal one, zeros included. Returns bool of the shape."""
    grid = float_grid(kv_format)
    return _nowhere(x) if grid is None else x.double().abs() / scale < grid.smallest_normal


def _nowhere(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.bool)
