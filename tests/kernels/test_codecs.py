"""KV codecs: every code, every rounding edge, against two independent implementations of each byte float."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from page4.kernels.codecs import (
    BYTE_FLOATS,
    E4M3_MAX,
    decode_byte_float,
    decode_e4m3,
    decode_kv,
    encode_byte_float,
    encode_e4m3,
    encode_int8_rows,
    encode_kv,
)
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


def test_all_e5m2_codes_decode_as_torch_and_ml_dtypes_do() -> None:
    ours = decode_byte_float(ALL_CODES, "e5m2")
    by_torch = ALL_CODES.view(torch.float8_e5m2).float()
    by_ml_dtypes = torch.from_numpy(ALL_CODES.numpy().view(ml_dtypes.float8_e5m2).astype(np.float32))
    number = ~ours.isnan()
    assert (~number).nonzero().flatten().tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    for oracle in (by_torch, by_ml_dtypes):
        assert torch.equal(oracle.isnan(), ours.isnan())
        assert same_bits(oracle[number], ours[number])


def test_e3m4_codes_below_the_largest_exponent_decode_as_ml_dtypes_does() -> None:
    """ml_dtypes has the IEEE-like variant; here the largest exponent holds numbers, up to 30."""
    ours = decode_byte_float(ALL_CODES, "e3m4")
    oracle = torch.from_numpy(ALL_CODES.numpy().view(ml_dtypes.float8_e3m4).astype(np.float32))
    below = (ALL_CODES & 0x7F) < 0x70
    assert same_bits(oracle[below], ours[below])
    assert ours[0x70:0x7F].tolist() == [16.0 + i for i in range(15)]
    assert ours[0xF0:0xFF].tolist() == [-16.0 - i for i in range(15)]
    assert ours.isnan().nonzero().flatten().tolist() == list(NAN_CODES)


def test_e2m5_is_a_multiple_of_its_step_below_one_and_has_five_bits_above() -> None:
    ours = decode_byte_float(ALL_CODES, "e2m5")
    assert ours[:0x40].tolist() == [i / 32 for i in range(0x40)]
    assert ours[0x40:0x60].tolist() == [2 + i / 16 for i in range(0x20)]
    assert ours[0x60:0x7F].tolist() == [4 + i / 8 for i in range(0x1F)]
    assert ours[0x80:0xFF].tolist() == [-value for value in ours[:0x7F].tolist()]
    assert ours.isnan().nonzero().flatten().tolist() == list(NAN_CODES)


@pytest.mark.parametrize("kv_format", BYTE_FLOATS)
def test_every_finite_code_of_a_byte_float_survives_a_round_trip(kv_format: str) -> None:
    finite = ALL_CODES[BYTE_FLOATS[kv_format].max_code >= (ALL_CODES & 0x7F)]
    values = decode_byte_float(finite, kv_format)
    assert values.isfinite().all() and values.max() == BYTE_FLOATS[kv_format].max_value
    assert torch.equal(encode_byte_float(values, kv_format, 1.0), finite)


@pytest.mark.parametrize("kv_format", BYTE_FLOATS)
def test_midpoints_of_every_byte_float_round_to_nearest_even(kv_format: str) -> None:
    largest = BYTE_FLOATS[kv_format].max_code
    values = decode_byte_float(torch.arange(largest + 1, dtype=torch.uint8), kv_format)
    midpoints = (values[1:] + values[:-1]) / 2
    lower = torch.arange(largest, dtype=torch.uint8)
    below, above = (
        torch.nextafter(midpoints, torch.tensor(0.0)),
        torch.nextafter(midpoints, torch.tensor(INF)),
    )
    for sign, bit in ((1.0, 0), (-1.0, 0x80)):
        assert torch.equal(encode_byte_float(sign * midpoints, kv_format, 1.0), (lower + (lower & 1)) | bit)
        assert torch.equal(encode_byte_float(sign * below, kv_format, 1.0), lower | bit)
        assert torch.equal(encode_byte_float(sign * above, kv_format, 1.0), (lower + 1) | bit)


@pytest.mark.parametrize("kv_format", BYTE_FLOATS)
def test_every_byte_float_saturates_and_keeps_nan(kv_format: str) -> None:
    largest = BYTE_FLOATS[kv_format].max_code
    x = torch.tensor([1e30, INF, -1e30, -INF, NAN, 0.0, -0.0, -1e-30])
    codes = encode_byte_float(x, kv_format, 1.0).tolist()
    assert codes == [largest, largest, largest | 0x80, largest | 0x80, 0x7F, 0x00, 0x80, 0x80]


@pytest.mark.parametrize(
    ("kv_format", "oracle", "limit"),
    [("e5m2", ml_dtypes.float8_e5m2, 57344.0), ("e3m4", ml_dtypes.float8_e3m4, 15.5)],
)
def test_all_fp16_inputs_encode_as_ml_dtypes_does(kv_format: str, oracle: type, limit: float) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = x[x.abs() <= limit]
    expected = torch.from_numpy(x.numpy().astype(oracle).view(np.uint8))
    assert torch.equal(encode_byte_float(x, kv_format, 1.0), expected)


def test_int8_rows_use_their_whole_range() -> None:
    x = torch.tensor([[127.0, -1.5, 0.5, 2.5], [-0.5, 0.25, 0.0, 0.125]])
    codes, scales = encode_int8_rows(x)
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float32
    assert decode_kv(codes, "int8").tolist() == [[127, -2, 0, 2], [-127, 64, 0, 32]]  # ties to even
    assert scales.tolist() == [1.0, float(torch.tensor(0.5) / 127)]


def test_int8_error_is_at_most_half_a_step() -> None:
    x = torch.randn(50, 2, 64) * torch.logspace(-20, 20, 50)[:, None, None]
    codes, scales = encode_int8_rows(x)
    error = (decode_kv(codes, "int8") * scales[..., None] - x).abs().amax(-1)
    assert (error <= 0.5001 * scales).all()
    assert decode_kv(codes, "int8").abs().amax(-1).eq(127).all()


def test_int8_rows_without_a_plain_maximum() -> None:
    x = torch.tensor([[0.0, -0.0], [1e-39, 0.0], [INF, 1.0], [NAN, 3.0], [-INF, NAN]])
    codes, scales = encode_int8_rows(x)
    values = decode_kv(codes, "int8") * scales[:, None]
    assert values[0].tolist() == [0.0, 0.0]
    assert scales[1] == torch.finfo(torch.float32).tiny and values[1].abs().max() <= 1e-38
    assert decode_kv(codes, "int8")[2].tolist() == [127.0, 0.0]
    assert scales[2] == torch.tensor(torch.finfo(torch.float32).max) / 127
    assert values[3:].isnan().all() and not codes[3:].any()


def test_int8_has_no_scale_for_all_rows() -> None:
    with pytest.raises(InputError, match="encode_int8_rows"):
        encode_kv(torch.ones(2, 4), "int8", 1.0)


def test_kv_formats_round_trip_in_their_storage_dtype() -> None:
    x = torch.randn(4, 2, 8)
    for kv_format, dtype, scale in (("fp32", torch.float32, 1.0), ("fp16", torch.float16, 1.0)):
        stored = encode_kv(x, kv_format, scale)
        assert stored.dtype == dtype
        assert torch.equal(decode_kv(stored, kv_format), x.to(dtype).float())
    for kv_format, scale in (("e4m3", 0.02), ("e5m2", 0.02), ("e3m4", 0.2), ("e2m5", 0.6)):
        stored, spec = encode_kv(x, kv_format, scale), BYTE_FLOATS[kv_format]
        assert stored.dtype == torch.uint8
        rtol, atol = 2.0 ** -(spec.mantissa_bits + 1), scale * spec.subnormal_step / 2
        torch.testing.assert_close(decode_kv(stored, kv_format) * scale, x, rtol=rtol, atol=atol)


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
    with pytest.raises(InputError, match="uint8"):
        decode_kv(torch.ones(2, dtype=torch.int8), "int8")
    with pytest.raises(InputError, match="float16"):
        decode_kv(torch.ones(2, dtype=torch.uint8), "fp16")
