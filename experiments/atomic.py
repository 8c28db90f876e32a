"""Text and JSON files that appear whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page4.kernels.atomic import atomic_path

__all__ = ["atomic_path", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; NaN and infinities, which JSON does not have, are a ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
