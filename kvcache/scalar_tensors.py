"""Safetensors files of FP32 scalars, read strictly and written reproducibly.

The library reads any safetensors file; what it accepts beyond the scalars of an overlay (other dtypes, names
given twice, gaps) is refused here, and the same scalars always give the same bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from page4.kernels.errors import InputError

from .strict_json import parse_json

_LENGTH = struct.Struct("<Q")
_FP32 = struct.Struct("<f")
_LONGEST_NAME = 200  # in messages


def write_scalars(scalars: Mapping[str, float]) -> bytes:
    """A safetensors file of FP32 scalars of shape ``[]``, by name in ascending order."""
    header = {
        name: {"dtype": "F32", "shape": [], "data_offsets": [_FP32.size * i, _FP32.size * (i + 1)]}
        for i, name in enumerate(sorted(scalars))
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    values = b"".join(_FP32.pack(scalars[name]) for name in sorted(scalars))
    return _LENGTH.pack(len(text)) + text + values


def read_scalars(data: bytes, file: str) -> dict[str, float]:
    """The FP32 scalars, of shape ``[]`` or ``[1]``, of a safetensors file; ``file`` is for messages.

    Raises:
        InputError: the content is truncated or no safetensors file, a tensor is no FP32 scalar or is named
            twice, or its bytes overlap others or leave some unused.
    """
    if len(data) < _LENGTH.size:
        raise InputError(f"{file} is truncated: {len(data)} bytes are no safetensors file")
    (length,) = _LENGTH.unpack_from(data)
    body = _LENGTH.size + length
    if body > len(data):
        raise InputError(f"{file} is truncated: its header of {length} bytes does not fit {len(data)} bytes")
    header = parse_json(data[_LENGTH.size : body], f"the header of {file}")
    if not isinstance(header, dict):
        raise InputError(f"the header of {file} is no JSON object")
    header.pop("__metadata__", None)
    found: dict[str, float] = {}
    places = set()
    for name, entry in header.items():
        start = _place(name, entry, len(data) - body, file)
        places.add(start)
        (found[name],) = _FP32.unpack_from(data, body + start)
    if places != set(range(0, len(data) - body, _FP32.size)) or len(places) != len(found):
        raise InputError(
            f"{file} is damaged: {len(data) - body} bytes of data are not one scalar for each name"
        )
    return found


def _place(name: str, entry: Any, size: int, file: str) -> int:
    """Offset of a scalar's four bytes."""
    name = name if name.isprintable() and len(name) <= _LONGEST_NAME else ascii(name)[:_LONGEST_NAME]
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InputError(
            f"{file}: {name!r} is described by something else than dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype != "F32":
        raise InputError(f"{file}: {name} has dtype {str(dtype)[:40]!r}, expected 'F32'")
    if shape not in ([], [1]) or any(type(length) is not int for length in shape):
        hint = ""
        if isinstance(shape, list) and len(shape) == 1:
            hint = "; scales per head are measured, but no kernel takes them"
        raise InputError(f"{file}: {name} has shape {str(shape)[:40]}, expected one scale, [] or [1]{hint}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(offset) is not int for offset in offsets)
    ):
        raise InputError(f"{file}: {name} has data_offsets {str(offsets)[:40]}, expected two integers")
    start, end = offsets
    if not 0 <= start < end <= size or end - start != _FP32.size:
        raise InputError(f"{file} is truncated or damaged: {name} lies at {start} to {end} of {size} bytes")
    return int(start)
