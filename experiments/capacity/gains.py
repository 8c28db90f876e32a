"""What a format gains over the first one: quotients of bytes and of capacities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def gains(row: Row, rows: Sequence[Row]) -> dict[str, float | None]:
    """Quotients that are above 1 where the row's format needs less than the first.

    ``per_token``: bytes of a token in pages; ``per_request``: bytes of a request of the row's context with
    its state; ``whole_cache``: bytes of a cache for the row's requests; ``tokens_that_fit``: tokens within
    the budget, None where none are.
    """
    base = baseline(row, rows)
    return {
        "per_token": base["bytes_per_token"] / row["bytes_per_token"],
        "per_request": base["request_bytes"] / row["request_bytes"],
        "whole_cache": base["cache_bytes"] / row["cache_bytes"],
        "tokens_that_fit": row["max_tokens"] / base["max_tokens"] if base["max_tokens"] else None,
    }


def baseline(row: Row, rows: Sequence[Row]) -> Row:
    """The row of the first pair of formats with all else equal."""
    alike = ("tensor_parallel", "context", "concurrency")
    return next(other for other in rows if all(other[name] == row[name] for name in alike))


def formats(row: Row) -> str:
    """``e4m3``, or ``e4m3, draft fp16`` where the draft has another format."""
    same = row["kv_format"] == row["draft_kv_format"]
    return str(row["kv_format"]) if same else f"{row['kv_format']}, draft {row['draft_kv_format']}"
