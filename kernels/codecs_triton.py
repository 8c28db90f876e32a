"""The formats of :mod:`page4.kernels.codecs` inside Triton kernels, bit for bit but for the sign of NaN.

:func:`encode` and :func:`decode` take any format. The two others are for kernels that count instructions:
they leave out a power of two (:data:`BITS_UNIT`, to be folded into the scale) and read a NaN code as a
number, and :func:`decode_words` turns four bytes of a 32-bit register into two registers of FP16 pairs.

How bytes decode: an FP16 number has five exponent bits (bias 15) and ten mantissa bits, so moving a code's
exponent and mantissa next to each other under its sign gives the value times ``2^(bias - 15)``, exactly and
with subnormals. An int8 code becomes the last mantissa bits of ``1024 + code + 128``.

``NATIVE`` uses the conversions of the GPU for e4m3 and e5m2 (:func:`has_native_fp8`); results are the same.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from page4.kernels.codecs import BYTE_FLOATS

# A decoded value is `decode_bits` times this. FP16 represents every such product, so it may be applied there.
BITS_UNIT = {
    "fp32": 1.0,
    "fp16": 1.0,
    **{name: 2.0 ** (15 - spec.bias) for name, spec in BYTE_FLOATS.items()},
    "int8": 1.0,
}


def has_native_fp8(device: torch.device) -> bool:
    """Whether Triton converts FP32 to e4m3 and e5m2 in one instruction (compute capability 9.0 or newer).

    For 8.9 it goes through FP16, which rounds twice.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _encode_byte_float(
    b_scaled,
    DROPPED_BITS: tl.constexpr,
    REBIAS: tl.constexpr,
    SMALLEST_NORMAL: tl.constexpr,
    ROUNDER: tl.constexpr,
    MAX_VALUE: tl.constexpr,
):
    """Codes of FP32 values, as int32; the steps are explained beside the reference."""
    b_bits = b_scaled.to(tl.int32, bitcast=True)
    b_is_nan = (b_bits & 0x7FFFFFFF) > 0x7F800000
    b_magnitude = tl.minimum(tl.abs(b_scaled), MAX_VALUE)
    b_kept = b_magnitude.to(tl.int32, bitcast=True)
    b_odd = (b_kept >> DROPPED_BITS) & 1
    b_normal = (b_kept - REBIAS + ((1 << (DROPPED_BITS - 1)) - 1) + b_odd) >> DROPPED_BITS
    # The sum's exponent is that of ROUNDER, whose mantissa is 0: what is above it is the code.
    b_subnormal = (b_magnitude + ROUNDER).to(tl.int32, bitcast=True) & 0x3F
    b_code = tl.where(b_magnitude < SMALLEST_NORMAL, b_subnormal, b_normal)
    return tl.where(b_is_nan, 0x7F, b_code) | ((b_bits >> 24) & 0x80)


@triton.jit
def encode(b_x, scale, FORMAT: tl.constexpr, NATIVE: tl.constexpr = False):
    """Stored form of ``b_x / scale``: FP32 division, nearest even, saturating (see the reference).

    ``b_x`` is FP32 of any shape and ``scale`` an FP32 scalar or a tensor that broadcasts to it: for int8 the
    row scales of :func:`int8_scale`. ``fp16`` and ``fp32`` ignore the scale. A NaN becomes a NaN code, 0x7F
    or 0xFF: which of the two is unspecified, because GPU arithmetic does not keep the sign of a NaN.
    """
    if FORMAT == "fp32":
        return b_x
    elif FORMAT == "fp16":
        return b_x.to(tl.float16)
    else:
        b_scaled = tl.div_rn(b_x, scale)
        if FORMAT == "int8":
            b_scaled = tl.where(b_scaled == b_scaled, b_scaled, 0.0)
            b_scaled = tl.minimum(tl.maximum(b_scaled, -127.0), 127.0)
            # 1.5 * 2^23 has a last place of 1: the sum rounds, and its last byte is the two's complement.
            return ((b_scaled + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)
        elif NATIVE and (FORMAT == "e4m3" or FORMAT == "e5m2"):
            if FORMAT == "e4m3":
                b_code = b_scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            else:
                b_code = b_scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
            return b_code
        elif FORMAT == "e4m3":
            return _encode_byte_float(b_scaled, 20, 120 << 23, 0.015625, 16384.0, 448.0).to(tl.uint8)
        elif FORMAT == "e5m2":
            return _encode_byte_float(b_scaled, 21, 112 << 23, 0.00006103515625, 128.0, 57344.0).to(tl.uint8)
        elif FORMAT == "e3m4":
            return _encode_byte_float(b_scaled, 19, 124 << 23, 0.25, 131072.0, 30.0).to(tl.uint8)
        else:
            tl.static_assert(FORMAT == "e2m5", "unknown KV format")
            return _encode_byte_float(b_scaled, 18, 126 << 23, 1.0, 262144.0, 7.75).to(tl.uint8)


@triton.jit
def magnitude_bits(b_x):
    """``|x|`` of FP32 values as int32, whose row maximum :func:`int8_scale` takes; NaN is above all."""
    return b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def int8_scale(b_largest):
    """Scale of every int8 row: ``max|x| / 127``, as the reference defines its edges.

    ``b_largest`` is the maximum of :func:`magnitude_bits` over each row; the result is FP32 of its shape. The
    caller reduces, axis by axis as its values lie: Triton 3.6 miscompiles a reduction over an axis that a
    reshape has merged when its lanes are not adjacent.
    """
    b_finite = tl.minimum(b_largest, 0x7F7FFFFF).to(tl.float32, bitcast=True)
    b_scale = tl.maximum(tl.div_rn(b_finite, 127.0), 1.1754943508222875e-38)
    return tl.where(b_largest > 0x7F800000, float("nan"), b_scale)


@triton.jit
def decode_bits(b_stored, FORMAT: tl.constexpr):
    """Value divided by ``BITS_UNIT[FORMAT]``: FP32 of fp32 pages, FP16 of all others.

    A NaN code of e4m3, e3m4 or e2m5 reads as a number (480, 31 or 7.875 over the unit), one of e5m2 as NaN.
    """
    if FORMAT == "fp32" or FORMAT == "fp16":
        return b_stored
    else:
        b_code = b_stored.to(tl.uint16)
        if FORMAT == "int8":
            return ((b_code ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        elif FORMAT == "e5m2":
            return (b_code << 8).to(tl.float16, bitcast=True)
        elif FORMAT == "e4m3":
            return (((b_code & 0x80) << 8) | ((b_code & 0x7F) << 7)).to(tl.float16, bitcast=True)
        elif FORMAT == "e3m4":
            return (((b_code & 0x80) << 8) | ((b_code & 0x7F) << 6)).to(tl.float16, bitcast=True)
        else:
            tl.static_assert(FORMAT == "e2m5", "unknown KV format")
            return (((b_code & 0x80) << 8) | ((b_code & 0x7F) << 5)).to(tl.float16, bitcast=True)


@triton.jit
def decode(b_stored, FORMAT: tl.constexpr, NATIVE: tl.constexpr = False):
    """Exact value, not multiplied by the scale: FP32 of fp32 pages, FP16 of all others; NaN codes are NaN."""
    if NATIVE and FORMAT == "e4m3":
        return b_stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == "e4m3":
        b_value = decode_bits(b_stored, FORMAT) * 256.0
        return tl.where((b_stored & 0x7F) == 0x7F, float("nan"), b_value).to(tl.float16)
    elif FORMAT == "e3m4":
        b_value = decode_bits(b_stored, FORMAT) * 4096.0
        return tl.where((b_stored & 0x7F) == 0x7F, float("nan"), b_value).to(tl.float16)
    elif FORMAT == "e2m5":
        b_value = decode_bits(b_stored, FORMAT) * 16384.0
        return tl.where((b_stored & 0x7F) == 0x7F, float("nan"), b_value).to(tl.float16)
    else:
        return decode_bits(b_stored, FORMAT)


@triton.jit
def decode_words(b_word, FORMAT: tl.constexpr):
    """Four codes of each int32 as FP16 pairs, over the unit: ``(bytes 0 and 2, bytes 1 and 3)``.

    Each result is int32 with the lower byte's FP16 number in its lower half. Three to six instructions for
    four values; element by element each takes about as many.
    """
    b_word = b_word.to(tl.uint32, bitcast=True)
    if FORMAT == "e5m2":
        b_even = (b_word & 0x00FF00FF) << 8
        b_odd = b_word & 0xFF00FF00
    elif FORMAT == "e4m3":
        b_even = ((b_word & 0x00800080) << 8) | ((b_word & 0x007F007F) << 7)
        b_odd = (b_word & 0x80008000) | ((b_word & 0x7F007F00) >> 1)
    elif FORMAT == "e3m4":
        b_even = ((b_word & 0x00800080) << 8) | ((b_word & 0x007F007F) << 6)
        b_odd = (b_word & 0x80008000) | ((b_word & 0x7F007F00) >> 2)
    else:
        tl.static_assert(FORMAT == "e2m5", "no FP16 pairs in words of this format")
        b_even = ((b_word & 0x00800080) << 8) | ((b_word & 0x007F007F) << 5)
        b_odd = (b_word & 0x80008000) | ((b_word & 0x7F007F00) >> 3)
    return b_even.to(tl.int32, bitcast=True), b_odd.to(tl.int32, bitcast=True)
