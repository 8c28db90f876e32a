"""Slabs of a matrix: what is dequantised at once, so that little memory is needed beside the result."""

from __future__ import annotations

from collections.abc import Iterator

_VALUES = 1 << 17  # half a MiB in FP32


def slabs(rows: int, columns: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """First and last row (exclusive) of slabs of about 131 thousand values, of whole multiples of rows."""
    height = max(1, _VALUES // max(1, columns) // multiple) * multiple
    for start in range(0, rows, height):
        yield start, min(start + height, rows)
