"""The columns of the tables of predictions: all that a reader of them needs, without what predicts.

`predictions.csv` has attention with its merge, `kernels.csv` the other calls of a step.
"""

from __future__ import annotations

from page4.experiments.sm70.prediction.cells import CELL_COLUMNS

ATTENTION_KEY = (*CELL_COLUMNS, "implementation")
ATTENTION_COLUMNS: dict[str, type] = {
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

STEP_KERNEL_KEY = ("kernel", *CELL_COLUMNS)
STEP_KERNEL_COLUMNS: dict[str, type] = {
    "kernel": str,
    **CELL_COLUMNS,
    "context": int,
    "status": str,  # predicted; refused; failed
    "launches": str,  # microseconds of each, or why there is no time
    "predicted_us": float,
    "floor_us": float,
    "floor_fraction": float,  # floor_us / predicted_us
    "bound": str,  # of the longest launch, as all below
    "registers": int,
    "spills": int,
    "blocks": int,
    "emulated_blocks": int,
    "seconds": float,
    "code": str,  # digest of what is launched: the row counts until that changes
}
