"""The steps that are predicted."""

from __future__ import annotations

from typing import Any

from page4.experiments.kernel_cases import StepShape
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.config import PredictConfig

CELL_COLUMNS = {"requests": int, "rows": int, "query_heads": int, "kv_heads": int, "kv_format": str}


def plan_cells(config: PredictConfig) -> list[StepShape]:
    """Every step once: all sizes in the first format, then the other formats."""
    common: dict[str, Any] = {
        "context": config.context, "overlap": config.overlap, "head_dim": config.head_dim, "topk": config.topk
    }  # fmt: skip
    first, others = config.formats[:1], config.formats[1:]
    sizes = StepShape.combinations(first, config.rows, config.heads, config.requests, **common)
    return sizes + StepShape.combinations(others, config.rows, config.heads, config.requests[:1], **common)


def cell_of(shape: StepShape) -> Row:
    """What tells steps apart."""
    return {name: getattr(shape, name) for name in CELL_COLUMNS}


def cell_label(row: Row) -> str:
    """Such as ``16 x 4, 24/2, e4m3``: requests, rows, heads and format."""
    return f"{row['requests']} x {row['rows']}, {row['query_heads']}/{row['kv_heads']}, {row['kv_format']}"
