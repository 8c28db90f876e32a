"""Floating-point results with one rounding, whatever the precision that numpy computes in.

A sum in float64 that is then rounded to float32 has been rounded twice. That matters only where the first
rounding hit the middle between two float32, so sums are rounded to odd there: the last bit of an inexact
float64 is set, which keeps the second rounding on the right side (Boldo and Melquiond, "Emulation of FMA and
correctly rounded sums: proved algorithms using rounding to odd", 2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_BELOW_FLOAT = np.int64(0x1FFFFFFF)  # bits of a float64 that a float32 has not
_MIDDLE = np.int64(0x10000000)
_SMALLEST_NORMAL = 2.0**-126
NAN = np.uint32(0x7FFFFFFF).view(np.float32)
HALF_NAN = np.uint16(0x7FFF).view(np.float16)


def canonical(value: Any) -> Any:
    """float32 with every NaN replaced by the one that arithmetic gives."""
    wrong = value != value
    return np.where(wrong, NAN, value) if np.any(wrong) else value


def odd_sum(a: Any, b: Any) -> Any:
    """``a + b`` in float64, rounded to odd where inexact."""
    total = np.asarray(a + b)
    again = total - a
    error = (a - (total - again)) + (b - again)  # Knuth: the sum is total + error exactly
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    outwards = (error > 0) == (total > 0)
    return np.where(inexact, np.where(outwards, bits + 1, bits - 1), bits).view(np.float64)


def fused(a: Any, b: Any, c: Any, mode: str = "RN") -> Any:
    """``a * b + c`` of float32, rounded once: to nearest even, or as ``RZ``, ``RM`` or ``RP`` say."""
    product = np.multiply(a, b, dtype=np.float64)  # exact: 48 bits
    if mode != "RN":
        return round_float(odd_sum(product, np.float64(c)), mode)
    total = np.atleast_1d(product + c)
    doubtful = total.view(np.int64) & _BELOW_FLOAT == _MIDDLE
    doubtful |= (np.abs(total) < _SMALLEST_NORMAL) & (total != 0)
    if doubtful.any():
        where = np.flatnonzero(doubtful)
        total[where] = odd_sum(_at(product, where), np.float64(_at(c, where)))
    return total.astype(np.float32)


def _at(value: Any, where: Array) -> Any:
    return value[where] if np.ndim(value) else value


def round_float(value: Any, mode: str) -> Any:
    """float64, rounded to odd where it was inexact, to float32."""
    nearest = value.astype(np.float32)
    if mode == "RN":
        return nearest
    wide = nearest.astype(np.float64)
    if mode == "RZ":
        wrong = np.abs(wide) > np.abs(value)
        return np.where(wrong, np.nextafter(nearest, np.float32(0)), nearest)
    if mode == "RM":
        wrong = wide > value
        return np.where(wrong, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    wrong = wide < value
    return np.where(wrong, np.nextafter(nearest, np.float32(np.inf)), nearest)
