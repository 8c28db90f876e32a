"""Files, text and JSON that appear whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page4.kernels.atomic import atomic_path, is_leftover, remove_leftovers

__all__ = ["atomic_path", "is_leftover", "remove_leftovers", "write_bytes", "write_json", "write_text"]


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically, its line ends as they are."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; NaN and infinities, which JSON does not have, are a ValueError."""
    write_text(path, _to_json(value) + "\n")


def _to_json(value: Any, indent: str = "") -> str:
    """JSON with a line for each record: what holds nothing but scalars stays on its line."""
    if not isinstance(value, dict | list | tuple):
        return json.dumps(value, allow_nan=False)
    parts = list(value.values()) if isinstance(value, dict) else list(value)
    if not any(isinstance(part, dict | list | tuple) and part for part in parts):
        return json.dumps(value, allow_nan=False)
    inner = indent + "  "
    lines = [_to_json(part, inner) for part in parts]
    if isinstance(value, dict):
        # Keys as json.dumps writes them, of numbers and None too.
        keys = [json.dumps({key: 0}, allow_nan=False)[1:-4] for key in value]
        lines = [f"{key}: {line}" for key, line in zip(keys, lines, strict=True)]
    first, last = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{first}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{last}"
