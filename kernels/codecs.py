"""Storage formats of the K/V cache: what a value becomes in memory, and back.

Byte formats are kept as uint8 and decoded by bits, because GPUs before compute capability 8.9 have no FP8
type:

- ``e4m3``: 1 sign, 4 exponent (bias 7) and 3 mantissa bits, largest value 448. No infinities; 0x7F and 0xFF
  are NaN. This is ``float8_e4m3fn`` of the OCP FP8 specification.
- ``e5m2``: 1, 5 (bias 15) and 2 bits, largest value 57344. 0x7C and 0xFC are infinite, codes beyond them NaN.
  This is ``float8_e5m2``, the upper byte of an FP16 number.
- ``e3m4``: 1, 3 (bias 3) and 4 bits. As in e4m3, the largest exponent holds numbers, so the largest value is
  30; no infinities; 0x7F and 0xFF are NaN. (An IEEE-like variant gives that exponent to infinity and NaN and
  ends at 15.5; codes below 0x70 agree.)
- ``e2m5``: 1, 2 (bias 1) and 5 bits, largest value 7.75; otherwise like e3m4. Below 1, about an eighth of the
  largest value, all its steps are equal, so it suits values without outliers: it is the most precise byte
  float where the RMS is not far below that eighth.
- ``int8``: two's complement, -127..127, with one FP32 scale per token and head. It has no NaN.

Decoding is exact and *unscaled*: the reader multiplies by the scale where that is cheapest (the K scale folds
into the softmax scale, the V scale into the final normalisation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from page4.kernels.errors import InputError

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "e4m3": torch.uint8,
    "e5m2": torch.uint8,
    "e3m4": torch.uint8,
    "e2m5": torch.uint8,
    "int8": torch.uint8,
}

_FP32 = torch.finfo(torch.float32)
_FP32_BIAS, _FP32_MANTISSA_BITS = 127, 23


@dataclass(frozen=True)
class ByteFloat:
    """An 8-bit float: a sign bit, then exponent and mantissa as in IEEE 754, subnormals included.

    Attributes:
        exponent_bits, mantissa_bits: seven together.
        max_code: code of the largest finite value; positive codes above it are NaN, except ``inf_code``.
        inf_code: code of infinity in a format that has one. Encoding never produces it: it saturates.
    """

    exponent_bits: int
    mantissa_bits: int
    max_code: int
    inf_code: int | None = None

    @property
    def bias(self) -> int:
        """What is subtracted from a stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def dropped_bits(self) -> int:
        """Mantissa bits of FP32 that the format has no room for."""
        return _FP32_MANTISSA_BITS - self.mantissa_bits

    @property
    def rebias(self) -> int:
        """Difference of the FP32 bits of a normal value, less the dropped ones, and its code."""
        return (_FP32_BIAS - self.bias) << _FP32_MANTISSA_BITS

    @property
    def smallest_normal(self) -> float:
        """Values below it are multiples of ``subnormal_step``."""
        return 2.0 ** (1 - self.bias)

    @property
    def subnormal_step(self) -> float:
        """Distance of subnormal values."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def max_value(self) -> float:
        """Largest finite value."""
        exponent, mantissa = self.max_code >> self.mantissa_bits, self.max_code % 2**self.mantissa_bits
        return float((1 + mantissa * 2.0**-self.mantissa_bits) * 2.0 ** (exponent - self.bias))


NAN_CODE = 0x7F  # what a positive NaN becomes, in every byte float
BYTE_FLOATS = {
    "e4m3": ByteFloat(exponent_bits=4, mantissa_bits=3, max_code=0x7E),
    "e5m2": ByteFloat(exponent_bits=5, mantissa_bits=2, max_code=0x7B, inf_code=0x7C),
    "e3m4": ByteFloat(exponent_bits=3, mantissa_bits=4, max_code=0x7E),
    "e2m5": ByteFloat(exponent_bits=2, mantissa_bits=5, max_code=0x7E),
}
E4M3_MAX = BYTE_FLOATS["e4m3"].max_value
INT8_MAX = 127


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


def check_token_scales(scales: Tensor | None, kv_format: str, shape: Sequence[int], name: str) -> None:
    """Refuse scales per token and head that are missing from ``int8``, or that another format is given.

    Args:
        scales: FP32 ``[P, Hkv, 16]`` for ``int8``, None for every other format.
        shape: ``[P, Hkv, 16]`` of the pages.

    Raises:
        InputError: missing or superfluous scales, or a tensor of another shape, dtype or layout.
    """
    if (scales is not None) != (kv_format == "int8"):
        raise InputError(f"{name} belong to the format int8 and to no other, got {kv_format}")
    if scales is None:
        return
    if scales.shape != tuple(shape) or scales.dtype != torch.float32 or not scales.is_contiguous():
        raise InputError(
            f"{name} must be contiguous float32 {list(shape)}, got {scales.dtype} {list(scales.shape)}"
        )


def encode_byte_float(x: Tensor, kv_format: str, scale: float) -> Tensor:
    """Encode ``x / scale`` as codes of a byte float: ``e4m3``, ``e5m2``, ``e3m4`` or ``e2m5``.

    The division is FP32 whatever the dtype of ``x`` (dividing in FP16 moves rounding ties), rounding is to
    nearest even, finite values beyond the largest and infinities saturate to it, and a NaN becomes the NaN
    code (0x7F or 0xFF). On a CPU its sign bit is kept; on a GPU, whose division gives one NaN for all, it is
    unspecified. -0.0 and values that round to it become 0x80.

    Shapes: any; returns uint8 of the same shape.

    Raises:
        InputError: a scale that is not a positive finite FP32 number.

    Source: OCP 8-bit Floating Point Specification (OFP8), section 5; saturating conversion.
    """
    check_scale(scale)
    spec = BYTE_FLOATS[kv_format]
    # A tensor on the device of x: CUDA turns division by a host number into a product with its reciprocal.
    divisor = torch.full((), scale, dtype=torch.float32, device=x.device)
    scaled = x.to(torch.float32) / divisor
    sign = (scaled.view(torch.int32) >> 24) & 0x80
    magnitude = scaled.abs().clamp(max=spec.max_value)  # NaN stays NaN
    bits = magnitude.view(torch.int32)
    # Round to nearest even: add half of the dropped range, less one when the kept last bit is even.
    kept_last_bit = (bits >> spec.dropped_bits) & 1
    half = (1 << (spec.dropped_bits - 1)) - 1
    normal = (bits - spec.rebias + half + kept_last_bit) >> spec.dropped_bits
    # A sum whose last place is the subnormal step rounds to nearest even itself, and its last bits, which
    # count the steps, are the code.
    rounder = spec.subnormal_step * 2.0**_FP32_MANTISSA_BITS
    subnormal = (magnitude + rounder).view(torch.int32) & (2 ** (spec.mantissa_bits + 1) - 1)
    code = torch.where(magnitude < spec.smallest_normal, subnormal, normal)
    code = torch.where(magnitude.isnan(), NAN_CODE, code)
    return (code | sign).to(torch.uint8)


@lru_cache(maxsize=16)
def _byte_float_values(kv_format: str, device: torch.device) -> Tensor:
    """FP32 value of each of the 256 codes: ``+-1.m * 2^(e - bias)``, or ``+-0.m * 2^(1 - bias)`` at e = 0."""
    spec = BYTE_FLOATS[kv_format]
    code = torch.arange(256, dtype=torch.int32, device=device)
    exponent_and_mantissa = code & 0x7F
    normal = ((exponent_and_mantissa << spec.dropped_bits) + spec.rebias).view(torch.float32)
    subnormal = exponent_and_mantissa.float() * spec.subnormal_step
    value = torch.where(exponent_and_mantissa >= 2**spec.mantissa_bits, normal, subnormal)
    value = torch.where(exponent_and_mantissa > spec.max_code, torch.nan, value)
    if spec.inf_code is not None:
        value = torch.where(exponent_and_mantissa == spec.inf_code, torch.inf, value)
    return torch.where(code >= 0x80, -value, value)


def decode_byte_float(codes: Tensor, kv_format: str) -> Tensor:
    """Exact FP32 value of the codes of a byte float, not multiplied by any scale.

    Shapes: uint8 of any shape; returns FP32 of the same shape.

    Raises:
        InputError: codes that are not uint8.
    """
    _check_codes(codes, kv_format)
    table = _byte_float_values(kv_format, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def encode_e4m3(x: Tensor, scale: float) -> Tensor:
    """:func:`encode_byte_float` of ``e4m3``, the format that most readers mean."""
    return encode_byte_float(x, "e4m3", scale)


def decode_e4m3(codes: Tensor) -> Tensor:
    """:func:`decode_byte_float` of ``e4m3``."""
    return decode_byte_float(codes, "e4m3")


def encode_int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode each row (one token of one head) as int8 with a scale of its own.

    Formula: ``scale = max|x| / 127`` over the last axis, ``code = round(x / scale)`` to nearest even, within
    +-127; both divisions are FP32. A scale below the smallest normal FP32 number is raised to it, so a row of
    zeros is stored as zeros. An infinity counts as the largest FP32 number. A NaN cannot be a code: it makes
    its row's scale NaN and its codes 0, so that the whole row decodes to NaN.

    Shapes: ``[..., D]``; returns uint8 ``[..., D]`` (two's complement) and FP32 scales ``[...]``.
    """
    wide = x.to(torch.float32).clamp(-_FP32.max, _FP32.max)  # NaN stays NaN
    divisor = torch.full((), INT8_MAX, dtype=torch.float32, device=x.device)
    scale = wide.abs().amax(-1) / divisor
    scale = torch.where(scale < _FP32.tiny, _FP32.tiny, scale)  # NaN stays NaN
    codes = (wide / scale.unsqueeze(-1)).round().nan_to_num(0.0).clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8).view(torch.uint8), scale


def decode_int8(codes: Tensor) -> Tensor:
    """FP32 value of int8 codes kept as uint8, not multiplied by the scale of their row.

    Shapes: uint8 of any shape; returns FP32 of the same shape.

    Raises:
        InputError: codes that are not uint8.
    """
    _check_codes(codes, "int8")
    return codes.contiguous().view(torch.int8).to(torch.float32)


def encode_kv(x: Tensor, kv_format: str, scale: float) -> Tensor:
    """Encode K or V values for storage; the stored value stands for ``decode_kv(stored) * scale``.

    ``fp32`` and ``fp16`` are dtype casts and carry no scale; byte floats are :func:`encode_byte_float`.

    Shapes: any; returns the format's storage dtype in the same shape.

    Raises:
        InputError: an unknown format, ``int8`` (its scales belong to the rows: :func:`encode_int8_rows`), a
            scale that is not a positive finite number, or one other than 1.0 for a format without a scale.
    """
    check_kv_format(kv_format)
    if kv_format in BYTE_FLOATS:
        return encode_byte_float(x, kv_format, scale)
    if kv_format == "int8":
        raise InputError("KV format int8 has a scale per token and head; encode_int8_rows encodes it")
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
    if kv_format in BYTE_FLOATS:
        return decode_byte_float(stored, kv_format)
    if kv_format == "int8":
        return decode_int8(stored)
    if stored.dtype != STORAGE_DTYPES[kv_format]:
        raise InputError(f"format {kv_format} is stored as {STORAGE_DTYPES[kv_format]}, got {stored.dtype}")
    return stored.to(torch.float32)


def _check_codes(codes: Tensor, kv_format: str) -> None:
    if codes.dtype != torch.uint8:
        raise InputError(f"format {kv_format} is stored as torch.uint8, got {codes.dtype}")
