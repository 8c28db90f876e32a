"""Files of FP32 scalars: what the safetensors library writes and reads, and nothing else."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from page4.kernels.errors import InputError
from page4.kvcache.scalar_tensors import read_scalars, write_scalars

SCALARS = {"b": 0.5, "a": 1.0000001, "c.d": 3e-5}


def fp32(scalars: dict[str, float]) -> dict[str, float]:
    return {name: float(np.float32(value)) for name, value in scalars.items()}


def test_the_library_reads_what_is_written() -> None:
    found = load(write_scalars(SCALARS))
    assert {name: (array.dtype, array.shape, float(array)) for name, array in found.items()} == {
        name: (np.dtype(np.float32), (), value) for name, value in fp32(SCALARS).items()
    }


@pytest.mark.parametrize("shape", [(), (1,)])
def test_what_the_library_writes_is_read(shape: tuple[int, ...]) -> None:
    arrays = {name: np.full(shape, value, np.float32) for name, value in SCALARS.items()}
    assert read_scalars(save(arrays, metadata={"format": "pt"}), "file") == fp32(SCALARS)


def test_equal_scalars_give_equal_bytes() -> None:
    assert write_scalars(SCALARS) == write_scalars(dict(reversed(SCALARS.items())))
    assert read_scalars(write_scalars(SCALARS), "file") == fp32(SCALARS)
    assert read_scalars(write_scalars({}), "file") == {}


def file(entries: Any, data: bytes = b"\0\0\x80?" * 2) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [], "data_offsets": [start, end]} | changes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is truncated"),
        (b"\0" * 7, "is truncated"),
        (struct.pack("<Q", 2**63) + b"{}", "its header of 9223372036854775808 bytes does not fit"),
        (file(b"{"), "is not valid JSON"),
        (file([1]), "is no JSON object"),
        (file({"a": entry(0, 4), "b": entry(0, 4)}), "not one scalar for each name"),
        (file({"a": entry(0, 4), "b": entry(0, 4)}, b"\0\0\x80?"), "not one scalar for each name"),
        (file({"a": entry(0, 4)}), "not one scalar for each name"),
        (file({"a": entry(0, 4), "b": entry(4, 8)}, b"\0" * 9), "not one scalar for each name"),
        (file({"a": entry(2, 6), "b": entry(0, 4)}), "not one scalar for each name"),
        (file({"a": entry(4, 12), "b": entry(0, 4)}), "lies at 4 to 12 of 8 bytes"),
        (file({"a": entry(-4, 0)}), "lies at -4 to 0"),
        (file({"a": entry(0, 4) | {"more": 1}}), "something else than dtype, shape and data_offsets"),
        (file({"a": 1}), "something else than dtype, shape and data_offsets"),
        (file({"a": entry(0, 4, dtype="F16")}), "has dtype 'F16', expected 'F32'"),
        (file({"a": entry(0, 4, shape=[2])}), "scales per head are measured, but no kernel takes them"),
        (file({"a": entry(0, 4, shape=[True])}), "has shape"),
        (file({"a": entry(0, 4, data_offsets=[False, 4])}), "expected two integers"),
        (file(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4)).encode(),) * 2)), "a key occurs twice"),
    ],
)
def test_anything_else_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_scalars(data, "file")
