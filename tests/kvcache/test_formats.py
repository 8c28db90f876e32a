"""KV formats by name."""

from __future__ import annotations

import pytest
import torch

from page4.kernels.codecs import STORAGE_DTYPES
from page4.kernels.errors import InputError
from page4.kvcache import FORMAT_NAMES, get_format


def test_the_formats_there_are() -> None:
    assert FORMAT_NAMES == ("fp32", "fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8")


@pytest.mark.parametrize(
    ("name", "storage", "size", "needs_scale", "max_value"),
    [
        ("fp32", torch.float32, 4, False, torch.finfo(torch.float32).max),
        ("fp16", torch.float16, 2, False, 65504.0),
        ("e4m3", torch.uint8, 1, True, 448.0),
        ("e5m2", torch.uint8, 1, True, 57344.0),
        ("e3m4", torch.uint8, 1, True, 30.0),
        ("e2m5", torch.uint8, 1, True, 7.75),
        ("int8", torch.uint8, 1, False, 127.0),
    ],
)
def test_properties(name: str, storage: torch.dtype, size: int, needs_scale: bool, max_value: float) -> None:
    kv_format = get_format(name)
    assert (kv_format.name, kv_format.storage, kv_format.bytes_per_value) == (name, storage, size)
    assert (kv_format.needs_scale, kv_format.max_value) == (needs_scale, max_value)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_scale_per_token_and_head_takes_four_bytes_of_int8_alone(name: str) -> None:
    kv_format = get_format(name)
    assert kv_format.has_token_scales == (name == "int8")
    assert kv_format.scale_bytes == (4 if name == "int8" else 0)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_codec_stores_what_the_format_says(name: str) -> None:
    assert STORAGE_DTYPES[name] == get_format(name).storage


@pytest.mark.parametrize("name", ["fp8", "E4M3", "", "e4m3fn"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError) as caught:
        get_format(name)
    known = "fp32, fp16, e4m3, e5m2, e3m4, e2m5, int8"
    assert str(caught.value) == f"KV format {name!r} is unknown, expected one of {known}"
