"""Rows of a study without an emulator."""

from __future__ import annotations

from page4.experiments.kernel_cases import StepShape
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.cells import cell_of
from page4.experiments.sm70.prediction.columns import ATTENTION_COLUMNS
from page4.experiments.sm70.prediction.config import Implementation
from page4.experiments.sm70.prediction.rows import row_without_time


def predicted(shape: StepShape, implementation: Implementation, us: float, floor_us: float = 20.0) -> Row:
    """A row with a time."""
    usual = {bool: False, int: 1, float: 0.5, str: "-"}
    row: Row = {name: usual[kind] for name, kind in ATTENTION_COLUMNS.items()}
    return (
        row
        | cell_of(shape)
        | {
            "implementation": implementation,
            "status": "predicted",
            "predicted_us": us,
            "floor_us": floor_us,
            "floor_fraction": floor_us / us,
            "floor_bytes": round(830e3 * floor_us),
        }
    )


def invented(shape: StepShape, implementation: Implementation) -> Row:
    """Times that grow with the requests, ten times as long without tensor cores; int8 is refused by those."""
    if shape.kv_format == "int8" and implementation == "gluon":
        return row_without_time(shape, implementation, "refused", "it reads fp16, got\nint8")
    us = 2.0 * shape.requests * (10 if implementation == "triton" else 1)
    return predicted(shape, implementation, us, floor_us=1.5 * shape.requests)
