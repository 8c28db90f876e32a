"""A prediction as a row of the study's table."""

from __future__ import annotations

from page4.experiments.bench.case import settings
from page4.experiments.kernel_cases import StepShape
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.attention import StepPrediction
from page4.experiments.sm70.prediction.cells import CELL_COLUMNS, cell_of
from page4.experiments.sm70.prediction.config import Implementation
from page4.experiments.sm70.predictor.static_report import dram_floor_us

KEY = (*CELL_COLUMNS, "implementation")
COLUMNS: dict[str, type] = {
    **CELL_COLUMNS,
    "implementation": str,
    "status": str,  # predicted; refused: the implementation cannot run it; failed: it has no time
    "config": str,  # or why there is no time
    "predicted_us": float,  # attention and merge
    "attention_us": float,
    "merge_us": float,
    "floor_bytes": int,
    "floor_us": float,
    "floor_fraction": float,  # floor_us / predicted_us
    "bound": str,  # of attention, as all below
    "registers": int,
    "spills": int,
    "shared_bytes": int,
    "warps_per_multiprocessor": int,
    "occupancy_limit": str,
    "hmma": int,
    "tensor_share": float,  # of attention's time, as all shares
    "issue_share": float,
    "lsu_share": float,
    "dram_share": float,
    "read_bytes": int,
    "written_bytes": int,
    "warp_instructions": int,
    "blocks": int,  # that were replayed
    "emulated_blocks": int,
    "seconds": float,  # that the prediction took
    "code": str,  # digest of what is launched: the row counts until that changes
}


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
    empty: Row = {name: "" if kind is str else None for name, kind in COLUMNS.items()}
    return empty | cell_of(shape) | {"implementation": implementation, "status": status, "config": text}
