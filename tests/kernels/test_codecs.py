"""KV codecs: every code, every rounding edge, against two independent E4M3 implementations."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from page4.kernels.codecs import E4M3_MAX, decode_e4m3, decode_kv, encode_e4m3, encode_kv
from page4.kernels.errors import InputError

ALL_CODES = torch.arange(256, dtype=torch.uint8)
NAN_CODES = (0x7F, 0xFF)
INF, NAN = math.inf, math.nan


def torch_encode(x: torch.Tensor) -> torch.Tensor:
    """The cast of torch on clamped FP32 values."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal as bit patterns, so that -0.0 and +0.0 differ."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_all_codes_decode_as_torch_and_ml_dtypes_do() -> None:
    ours = decode_e4m3(ALL_CODES)
    by_torch = ALL_CODES.view(torch.float8_e4m3fn).float()
    by_ml_dtypes = torch.from_numpy(ALL_CODES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    finite = ~ours.isnan()
    assert ours.isnan().nonzero().flatten().tolist() == list(NAN_CODES)
    for oracle in (by_torch, by_ml_dtypes):
        assert torch.equal(oracle.isnan(), ours.isnan())
        assert same_bits(oracle[finite], ours[finite])


def test_every_finite_code_survives_a_round_trip() -> None:
    finite = ALL_CODES[(ALL_CODES & 0x7F) != 0x7F]
    assert torch.equal(encode_e4m3(decode_e4m3(finite), 1.0), finite)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (447.9, 0x7E),
        (448.0, 0x7E),
        (464.0, 0x7E),  # midway to the 480 that the format does not have
        (math.nextafter(464.0, INF), 0x7E),
        (480.0, 0x7E),
        (1e30, 0x7E),
        (-1e30, 0xFE),
        (INF, 0x7E),
        (-INF, 0xFE),
        (NAN, 0x7F),
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-9, 0x01),  # smallest subnormal
        (-(2.0**-9), 0x81),
        (7 * 2.0**-9, 0x07),  # largest subnormal
        (2.0**-6, 0x08),  # smallest normal
        (2.0**-10, 0x00),  # tie between 0 and the smallest subnormal goes to even
        (-(2.0**-10), 0x80),
        (math.nextafter(2.0**-10, 0.0), 0x00),
        (1.01 * 2.0**-10, 0x01),
        (1.5 * 2.0**-9, 0x02),
        (7.5 * 2.0**-9, 0x08),  # a subnormal that rounds up into the normals
        (1.0625, 0x38),  # tie between 1.0 (even) and 1.125
        (1.1875, 0x3A),  # tie between 1.125 and 1.25 (even)
        (1.96875, 0x40),  # carries into the exponent
    ],
)
def test_cast_edges(value: float, code: int) -> None:
    assert encode_e4m3(torch.tensor([value]), 1.0).item() == code


def test_nan_keeps_its_sign_bit() -> None:
    bits = torch.tensor(
        [0x7FC00000, -0x00400000, 0x7F800001], dtype=torch.int32
    )  # NaN, -NaN, another payload
    assert encode_e4m3(bits.view(torch.float32), 3.0).tolist() == [0x7F, 0xFF, 0x7F]


def test_midpoints_and_their_neighbours_round_to_nearest_even() -> None:
    values = decode_e4m3(torch.arange(0x7F, dtype=torch.uint8))  # 0 .. 448 ascending
    midpoints = (values[1:] + values[:-1]) / 2
    below = torch.nextafter(midpoints, torch.tensor(0.0))
    above = torch.nextafter(midpoints, torch.tensor(INF))
    lower = torch.arange(0x7E, dtype=torch.uint8)
    even = lower + (lower & 1)
    for sign, bit in ((1.0, 0), (-1.0, 0x80)):
        assert torch.equal(encode_e4m3(sign * midpoints, 1.0), even | bit)
        assert torch.equal(encode_e4m3(sign * below, 1.0), lower | bit)
        assert torch.equal(encode_e4m3(sign * above, 1.0), (lower + 1) | bit)


def test_all_fp16_inputs_encode_as_the_clamped_fp32_cast() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = x[~x.isnan()]
    assert torch.equal(encode_e4m3(numbers, 1.0), torch_encode(numbers))
    nans = x[x.isnan()]
    assert torch.equal(encode_e4m3(nans, 1.0), torch.where(nans.view(torch.int16) < 0, 0xFF, 0x7F).byte())


def test_random_fp32_inputs_agree_with_ml_dtypes() -> None:
    generator = torch.Generator().manual_seed(0)
    magnitude = 2.0 ** (24 * torch.rand(200_000, generator=generator) - 14)
    x = torch.where(torch.rand(200_000, generator=generator) < 0.5, -magnitude, magnitude)
    clamped = x.clamp(-E4M3_MAX, E4M3_MAX).numpy()
    oracle = torch.from_numpy(clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert torch.equal(encode_e4m3(x, 1.0), oracle)


def test_the_division_by_the_scale_is_fp32() -> None:
    x = torch.arange(1, 2**15, dtype=torch.int16).view(torch.float16)
    x = x[x.isfinite()]
    for scale in (0.0115, 0.1, 0.7):
        fp32_code = torch_encode(x.float() / torch.tensor(scale))
        fp16_code = torch_encode((x / torch.tensor(scale, dtype=torch.float16)).float())
        assert (fp16_code != fp32_code).any()  # the two differ, so this test can tell them apart
        assert torch.equal(encode_e4m3(x, scale), fp32_code)


def test_a_power_of_two_scale_changes_nothing_but_the_exponent() -> None:
    x = torch.randn(1000)
    assert torch.equal(encode_e4m3(x, 1.0), encode_e4m3(64.0 * x, 64.0))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 5)])
def test_any_shape_is_kept(shape: tuple[int, ...]) -> None:
    codes = encode_e4m3(torch.ones(shape), 0.5)
    assert codes.shape == shape
    assert decode_e4m3(codes).shape == shape


def test_a_strided_input_decodes_in_its_own_order() -> None:
    codes = ALL_CODES[:120].view(10, 12)
    assert same_bits(decode_e4m3(codes.T), decode_e4m3(codes).T)


def test_kv_formats_round_trip_in_their_storage_dtype() -> None:
    x = torch.randn(4, 2, 8)
    for kv_format, dtype, scale in (("fp32", torch.float32, 1.0), ("fp16", torch.float16, 1.0)):
        stored = encode_kv(x, kv_format, scale)
        assert stored.dtype == dtype
        assert torch.equal(decode_kv(stored, kv_format), x.to(dtype).float())
    stored = encode_kv(x, "e4m3", 0.02)
    assert stored.dtype == torch.uint8
    torch.testing.assert_close(decode_kv(stored, "e4m3") * 0.02, x, rtol=2.0**-4, atol=0.02 * 2.0**-10)


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF, -INF, 1e-46, 1e39])
def test_a_scale_that_is_not_a_positive_fp32_number_is_refused(scale: float) -> None:
    with pytest.raises(InputError, match="scale"):
        encode_e4m3(torch.ones(2), scale)


@pytest.mark.parametrize("kv_format", ["fp32", "fp16"])
def test_formats_without_a_scale_refuse_one(kv_format: str) -> None:
    with pytest.raises(InputError, match=r"1\.0"):
        encode_kv(torch.ones(2), kv_format, 0.5)


def test_an_unknown_format_is_named_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'fp7'.*fp32, fp16, e4m3"):
        encode_kv(torch.ones(2), "fp7", 1.0)


def test_stored_values_of_another_format_are_refused() -> None:
    with pytest.raises(InputError, match="uint8"):
        decode_kv(torch.ones(2, dtype=torch.float16), "e4m3")
    with pytest.raises(InputError, match="float16"):
        decode_kv(torch.ones(2, dtype=torch.uint8), "fp16")
