"""A prediction as a row of the study's table."""

from __future__ import annotations

from page4.experiments.bench.case import settings
from page4.experiments.kernel_cases import StepShape
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.attention import StepPrediction
from page4.experiments.sm70.prediction.cells import cell_of
from page4.experiments.sm70.prediction.columns import ATTENTION_COLUMNS
from page4.experiments.sm70.prediction.config import Implementation
from page4.experiments.sm70.predictor.static_report import dram_floor_us


def predicted_row(shape: StepShape, implementation: Implementation, step: StepPrediction) -> Row:
    """The row of a step that has a time."""
    attention, *merge = step.kernels
    prediction = attention.prediction
    static, replay, shares = prediction.static, prediction.replay, prediction.shares
    floor_us = dram_floor_us(step.floor_bytes)
    return {
        **cell_of(shape),
        "implementation": implementation,
        "status": "predicted",
        "config": f"{settings(step.choice.config)} ({step.choice.source})",
        "predicted_us": step.us,
        "attention_us": prediction.us,
        "merge_us": sum(kernel.prediction.us for kernel in merge),
        "floor_bytes": step.floor_bytes,
        "floor_us": floor_us,
        "floor_fraction": floor_us / step.us,
        "bound": prediction.bound,
        "registers": static.registers,
        "spills": static.spills,
        "shared_bytes": static.shared_bytes,
        "warps_per_multiprocessor": static.occupancy.warps,
        "occupancy_limit": static.occupancy.limit,
        "hmma": static.hmma,
        "tensor_share": shares["TENSOR"],
        "issue_share": shares["issue"],
        "lsu_share": shares["LSU"],
        "dram_share": shares["DRAM"],
        "read_bytes": replay.read_bytes,
        "written_bytes": replay.written_bytes,
        "warp_instructions": replay.issued,
        "blocks": prediction.blocks,
        "emulated_blocks": prediction.emulated_blocks,
        "seconds": step.seconds,
        "code": "",  # the study's
    }


def row_without_time(shape: StepShape, implementation: Implementation, status: str, reason: str) -> Row:
    """The row of a step that has none."""
    text = " ".join(reason.split())
    empty: Row = {name: "" if kind is str else None for name, kind in ATTENTION_COLUMNS.items()}
    return empty | cell_of(shape) | {"implementation": implementation, "status": status, "config": text}
