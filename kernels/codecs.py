"""Storage formats of the K/V cache: what a value becomes in memory, and back.

``e4m3`` is the 8-bit float of the OCP FP8 specification without infinities (``float8_e4m3fn``): one sign,
four exponent (bias 7) and three mantissa bits, largest value 448, 0x7F and 0xFF are NaN. Codes are kept as
uint8 and decoded by bits, because GPUs before compute capability 8.9 have no FP8 type.

Decoding is exact and *unscaled*: the reader multiplies by the scale where that is cheapest (the K scale folds
into the softmax scale, the V scale into the final normalisation).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from page4.kernels.errors import InputError

E4M3_MAX = 448.0
E4M3_NAN = 0x7F

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "e4m3": torch.uint8,
}

_FP32 = torch.finfo(torch.float32)
# FP32 exponents are biased by 127, E4M3 exponents by 7; seven exponent and mantissa bits remain of
# thirty-one.
_MANTISSA_BITS_DROPPED = 20
_REBIAS = (127 - 7) << 23
_SMALLEST_NORMAL = 2.0**-6
# Adding 2^14 leaves FP32 a last place of 2^-9, the E4M3 subnormal step: the addition itself rounds to nearest
# even.
_SUBNORMAL_ROUNDER = 2.0**14


def check_scale(scale: float, name: str = "scale") -> None:
    """Refuse a scale that is not a positive, finite, normal FP32 number.

    Raises:
        InputError: zero, negative, NaN, infinite, or outside the normal FP32 range.
    """
    if not _FP32.tiny <= scale <= _FP32.max:
        raise InputError(f"{name} must be a positive finite FP32 number, got {scale}")


def check_kv_format(kv_format: str) -> None:
    """Refuse a format name that this module cannot store.

    Raises:
        InputError: unknown name; the message lists the known ones.
    """
    if kv_format not in STORAGE_DTYPES:
        raise InputError(f"unknown KV format {kv_format!r}; known formats: {', '.join(STORAGE_DTYPES)}")


def encode_e4m3(x: Tensor, scale: float) -> Tensor:
    """Encode ``x / scale`` as E4M3 codes.

    The division is FP32 whatever the dtype of ``x`` (dividing in FP16 moves rounding ties), rounding is to
    nearest even, finite values beyond +-448 and infinities saturate to +-448, and a NaN becomes the NaN code
    with its sign bit kept (0x7F or 0xFF). -0.0 and values that round to it become 0x80.

    Shapes: any; returns uint8 of the same shape.

    Raises:
        InputError: a scale that is not a positive finite FP32 number.

    Source: OCP 8-bit Floating Point Specification (OFP8), section 5; saturating conversion.
    """
    check_scale(scale)
    # A tensor on the device of x: CUDA turns division by a host number into a product with its reciprocal.
    divisor = torch.full((), scale, dtype=torch.float32, device=x.device)
    scaled = x.to(torch.float32) / divisor
    sign = (scaled.view(torch.int32) >> 24) & 0x80
    magnitude = scaled.abs().clamp(max=E4M3_MAX)  # NaN stays NaN
    bits = magnitude.view(torch.int32)
    # Round to nearest even: add half of the dropped range, less one when the kept last bit is even.
    kept_last_bit = (bits >> _MANTISSA_BITS_DROPPED) & 1
    half = (1 << (_MANTISSA_BITS_DROPPED - 1)) - 1
    normal = (bits - _REBIAS + half + kept_last_bit) >> _MANTISSA_BITS_DROPPED
    # The last bits of the FP32 sum count subnormal steps, so they are the code.
    subnormal = (magnitude + _SUBNORMAL_ROUNDER).view(torch.int32) & 0xF
    code = torch.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    code = torch.where(magnitude.isnan(), E4M3_NAN, code)
    return (code | sign).to(torch.uint8)


@lru_cache(maxsize=16)
def _e4m3_values(device: torch.device) -> Tensor:
    """FP32 value of each of the 256 codes: ``+-1.mmm * 2^(e-7)``, or ``+-0.mmm * 2^-6`` when ``e = 0``."""
    code = torch.arange(256, dtype=torch.int32, device=device)
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    normal = ((code & 0x7F) << _MANTISSA_BITS_DROPPED) + _REBIAS
    value = torch.where(exponent > 0, normal.view(torch.float32), mantissa.float() * 2.0**-9)
    value = torch.where((code & 0x7F) == E4M3_NAN, torch.nan, value)
    return torch.where(code >= 0x80, -value, value)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Exact FP32 value of E4M3 codes, not multiplied by any scale; 0x7F and 0xFF decode to NaN.

    Shapes: uint8 of any shape; returns FP32 of the same shape.

    Raises:
        InputError: codes that are not uint8.
    """
    if codes.dtype != torch.uint8:
        raise InputError(f"E4M3 codes must be uint8, got {codes.dtype}")
    table = _e4m3_values(codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def encode_kv(x: Tensor, kv_format: str, scale: float) -> Tensor:
    """Encode K or V values for storage; the stored value stands for ``decode_kv(stored) * scale``.

    ``fp32`` and ``fp16`` are dtype casts and carry no scale; ``e4m3`` is :func:`encode_e4m3`.

    Shapes: any; returns the format's storage dtype in the same shape.

    Raises:
        InputError: an unknown format, a scale that is not a positive finite number, or a scale other than 1.0
            for a format that cannot carry one.
    """
    check_kv_format(kv_format)
    if kv_format == "e4m3":
        return encode_e4m3(x, scale)
    if scale != 1.0:
        raise InputError(f"KV format {kv_format} carries no scale, so it must be 1.0, got {scale}")
    return x.to(STORAGE_DTYPES[kv_format])


def decode_kv(stored: Tensor, kv_format: str) -> Tensor:
    """FP32 value of stored K or V, exact and not multiplied by any scale.

    Shapes: any, in the format's storage dtype; returns FP32 of the same shape.

    Raises:
        InputError: an unknown format, or a tensor that is not in its storage dtype.
    """
    check_kv_format(kv_format)
    if stored.dtype != STORAGE_DTYPES[kv_format]:
        raise InputError(f"format {kv_format} is stored as {STORAGE_DTYPES[kv_format]}, got {stored.dtype}")
    return decode_e4m3(stored) if kv_format == "e4m3" else stored.to(torch.float32)
