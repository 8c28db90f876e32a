"""The formats inside kernels equal the reference, bit for bit; only the sign of a NaN is left open."""

from __future__ import annotations

import math
import re

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.experiments.sm70.compiling import CAPABILITIES, compile_for
from page4.kernels.codecs import BYTE_FLOATS, decode_kv, encode_int8_rows, encode_kv
from page4.kernels.codecs_triton import (
    BITS_UNIT,
    decode,
    decode_bits,
    decode_words,
    encode,
    has_native_fp8,
    int8_scale,
    magnitude_bits,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BYTES = [*BYTE_FLOATS, "int8"]
# Native conversions exist on the GPU only; there, both ways are tested.
NATIVE = [False, True] if has_native_fp8(DEVICE) else [False]
ALL_CODES = torch.arange(256, dtype=torch.uint8, device=DEVICE)
INF, NAN = math.inf, math.nan


@triton.jit
def encode_kernel(p_x, p_code, scale, N: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.store(p_code + o_n, encode(tl.load(p_x + o_n).to(tl.float32), scale, FORMAT, NATIVE))


@triton.jit
def decode_kernel(p_code, p_value, p_raw, N: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    o_n = tl.arange(0, N)
    b_code = tl.load(p_code + o_n)
    tl.store(p_value + o_n, decode(b_code, FORMAT, NATIVE))
    tl.store(p_raw + o_n, decode_bits(b_code, FORMAT))


@triton.jit
def decode_words_kernel(p_word, p_even, p_odd, N: tl.constexpr, FORMAT: tl.constexpr):
    o_n = tl.arange(0, N)
    b_even, b_odd = decode_words(tl.load(p_word + o_n), FORMAT)
    tl.store(p_even + o_n, b_even)
    tl.store(p_odd + o_n, b_odd)


@triton.jit
def encode_int8_kernel(p_x, p_code, p_scale, M: tl.constexpr, D: tl.constexpr):
    o_m, o_d = tl.arange(0, M), tl.arange(0, D)
    b_x = tl.load(p_x + o_m[:, None] * D + o_d[None, :]).to(tl.float32)
    b_scale = int8_scale(tl.max(magnitude_bits(b_x), 1))
    tl.store(p_scale + o_m, b_scale)
    tl.store(p_code + o_m[:, None] * D + o_d[None, :], encode(b_x, b_scale[:, None], "int8"))


def run_encode(x: Tensor, kv_format: str, scale: float = 1.0, native: bool = False) -> Tensor:
    """Codes of the kernel; x is padded to a power of two, which Triton's ranges need."""
    size = triton.next_power_of_2(len(x))
    padded = torch.nn.functional.pad(x, (0, size - len(x))).to(DEVICE)
    code = torch.empty(size, dtype=encode_kv(x[:1], "fp16", 1.0).dtype, device=DEVICE)
    if kv_format in BYTE_FLOATS:
        code = code.to(torch.uint8)
    encode_kernel[(1,)](padded, code, scale, size, kv_format, native)
    return code[: len(x)].cpu()


def run_decode(kv_format: str, native: bool = False) -> tuple[Tensor, Tensor]:
    """Values of all codes, and their bits over the unit, both as FP32."""
    value, raw = (torch.empty(256, dtype=torch.float16, device=DEVICE) for _ in range(2))
    decode_kernel[(1,)](ALL_CODES, value, raw, 256, kv_format, native)
    return value.cpu().float(), raw.cpu().float()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as bit patterns where both are numbers, and NaN in the same places."""
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    number = ~a.isnan()
    return torch.equal(a[number].view(torch.int32), b[number].view(torch.int32))


def same_codes(actual: Tensor, expected: Tensor, kv_format: str) -> bool:
    """Equal codes; a NaN may have either sign, which arithmetic on a GPU does not keep."""
    is_nan = decode_kv(expected, kv_format).isnan()
    return torch.equal(torch.where(is_nan, actual & 0x7F, actual), torch.where(is_nan, 0x7F, expected))


def edges(kv_format: str) -> Tensor:
    """Every value, every midpoint and both neighbours, with both signs, and what lies outside."""
    spec = BYTE_FLOATS[kv_format]
    values = decode_kv(torch.arange(spec.max_code + 1, dtype=torch.uint8), kv_format)
    midpoints = (values[1:] + values[:-1]) / 2
    below, above = (
        torch.nextafter(midpoints, torch.tensor(0.0)),
        torch.nextafter(midpoints, torch.tensor(INF)),
    )
    beyond = spec.max_value * torch.tensor([1.0, 1.03, 1.04, 1.1, 1e30])
    positive = torch.cat((values, midpoints, below, above, beyond, torch.tensor([1e-30, INF, NAN])))
    return torch.cat((positive, -positive))


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("kv_format", BYTES)
def test_all_codes_decode_as_in_the_reference(kv_format: str, native: bool) -> None:
    value, raw = run_decode(kv_format, native)
    expected = decode_kv(ALL_CODES.cpu(), kv_format)
    assert same_bits(value, expected)
    number = ~expected.isnan()
    assert same_bits((raw * BITS_UNIT[kv_format])[number], expected[number])


def test_bits_of_a_nan_code_read_as_a_number() -> None:
    for kv_format, number in (("e4m3", 480.0), ("e3m4", 31.0), ("e2m5", 7.875)):
        _, raw = run_decode(kv_format)
        assert (raw * BITS_UNIT[kv_format])[[0x7F, 0xFF]].tolist() == [number, -number]


@pytest.mark.parametrize("kv_format", BYTE_FLOATS)
def test_words_hold_four_codes(kv_format: str) -> None:
    codes = ALL_CODES[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    even, odd = (torch.empty(64, dtype=torch.int32, device=DEVICE) for _ in range(2))
    decode_words_kernel[(1,)](codes.view(torch.int32), even, odd, 64, kv_format)
    pairs = torch.stack((even.view(torch.float16).view(64, 2), odd.view(torch.float16).view(64, 2)), dim=-1)
    _, raw = run_decode(kv_format)
    assert same_bits(pairs.reshape(-1).cpu().float(), raw[codes.cpu().long()])  # bytes 0, 1, 2, 3 in order


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("kv_format", BYTE_FLOATS)
def test_edges_encode_as_in_the_reference(kv_format: str, native: bool) -> None:
    x = edges(kv_format)
    assert same_codes(run_encode(x, kv_format, native=native), encode_kv(x, kv_format, 1.0), kv_format)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("scale", [1.0, 0.0115, 0.1, 37.5])
@pytest.mark.parametrize("kv_format", BYTE_FLOATS)
def test_all_fp16_inputs_encode_as_in_the_reference(kv_format: str, scale: float, native: bool) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert same_codes(run_encode(x, kv_format, scale, native), encode_kv(x, kv_format, scale), kv_format)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("kv_format", BYTE_FLOATS)
def test_every_kind_of_nan_becomes_the_nan_code(kv_format: str, native: bool) -> None:
    """Quiet and signalling, of both signs, with the first, the last and all payload bits."""
    bits = torch.tensor([0x7FC00000, -0x00400000, 0x7F800001, -0x007FFFFF, 0x7FFFFFFF, -1], dtype=torch.int32)
    codes = run_encode(bits.view(torch.float32), kv_format, 3.0, native)
    assert (codes & 0x7F == 0x7F).all()


def test_fp16_overflows_to_infinity_as_the_cast_does() -> None:
    x = torch.tensor([65519.0, 65520.0, -1e9, 2.0**-25, NAN])
    assert same_bits(run_encode(x, "fp16").float(), x.half().float())


def test_int8_rows_encode_as_in_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, generator=generator) * 10.0 ** torch.arange(-8, 8)[:, None]
    x[1] = 0.0
    x[2] = -0.0
    x[3, 5] = INF
    x[4, :2] = torch.tensor([NAN, INF])
    x[5] = 1e-39  # subnormal
    x[6] = torch.arange(64) * 0.5  # exact midpoints once the largest is 127
    x[6, 63] = -127.0
    code = torch.empty(16, 64, dtype=torch.uint8, device=DEVICE)
    scale = torch.empty(16, device=DEVICE)
    encode_int8_kernel[(1,)](x.to(DEVICE), code, scale, 16, 64)
    expected_code, expected_scale = encode_int8_rows(x)
    assert same_bits(scale.cpu(), expected_scale)
    assert torch.equal(code.cpu(), expected_code)


@pytest.mark.parametrize("kv_format", ["fp16", *BYTES])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability: int, kv_format: str) -> None:
    stored = "*fp16" if kv_format == "fp16" else "*u8"
    constants = {"N": 1024, "FORMAT": kv_format, "NATIVE": False}
    encoded = compile_for(
        encode_kernel, {"p_x": "*fp32", "p_code": stored, "scale": "fp32"}, constants, capability
    )
    types = {"p_code": stored, "p_value": "*fp16", "p_raw": "*fp16"}
    decoded = compile_for(decode_kernel, types, constants, capability)
    assert encoded.stack_bytes == decoded.stack_bytes == 0
    # An approximate division would move rounding ties.
    assert ("div.rn.f32" in encoded.ptx) == (kv_format != "fp16")
    assert "div.full" not in encoded.ptx
    # GPUs before 8.9 have no FP8 type: bytes are decoded by bits.
    assert not re.search("e4m3x2|e5m2x2", encoded.ptx + decoded.ptx)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_int8_and_words_compile(capability: int) -> None:
    compile_for(
        encode_int8_kernel,
        {"p_x": "*fp16", "p_code": "*u8", "p_scale": "*fp32"},
        {"M": 4, "D": 128},
        capability,
    )
    for kv_format in BYTE_FLOATS:
        types = {"p_word": "*i32", "p_even": "*i32", "p_odd": "*i32"}
        compile_for(decode_words_kernel, types, {"N": 1024, "FORMAT": kv_format}, capability)


def test_native_conversions_are_single_instructions() -> None:
    for kv_format in ("e4m3", "e5m2"):
        constants = {"N": 1024, "FORMAT": kv_format, "NATIVE": True}
        types = {"p_x": "*fp32", "p_code": "*u8", "scale": "fp32"}
        assert f"satfinite.{kv_format}x2.f32" in compile_for(encode_kernel, types, constants, 90).ptx
    types = {"p_code": "*u8", "p_value": "*fp16", "p_raw": "*fp16"}
    constants = {"N": 1024, "FORMAT": "e4m3", "NATIVE": True}
    assert "cvt.rn.f16x2.e4m3x2" in compile_for(decode_kernel, types, constants, 90).ptx
