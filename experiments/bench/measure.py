"""One cell of the bench as rows of its table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from page4.experiments.bench.attention_case import attention_case, planned_case
from page4.experiments.bench.case import Case, Contender
from page4.experiments.bench.cells import SHAPE_COLUMNS, Cell
from page4.experiments.bench.config import BenchConfig, Kernel
from page4.experiments.bench.copies import NoRoomError
from page4.experiments.bench.gated_delta_case import gated_delta_case, prefill_delta_case
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.prepare_case import prepare_case
from page4.experiments.bench.selection_case import scores_case, select_case
from page4.experiments.bench.verify_case import verify_case
from page4.experiments.bench.warmup import FAILURES
from page4.experiments.samples import Row

CASES: dict[Kernel, Callable[[Cell, BenchConfig, Machine], Case]] = {
    "qsa_prepare": prepare_case,
    "index_scores": scores_case,
    "block_select": select_case,
    "page4_attention": attention_case,
    "planned_attention": planned_case,
    "prefill": attention_case,
    "gated_delta": gated_delta_case,
    "gated_delta_prefill": prefill_delta_case,
    "mtp_verify": verify_case,
    "mtp_verify_sampled": verify_case,
    "mtp_verify_filtered": verify_case,
}

KEY = ("kernel", *SHAPE_COLUMNS, "implementation")
COLUMNS: dict[str, type] = {
    "kernel": str,
    **SHAPE_COLUMNS,
    "implementation": str,
    "chosen": bool,  # whether the model gets this implementation on this machine
    "config": str,
    "status": str,  # ok; wrong: the result is not within its bound; failed: no launch; no room: no inputs
    "error": float,  # largest error over what is permitted
    "checked_groups": int,
    "groups": int,
    "floor_bytes": int,
    "copies": int,
    "cold": bool,
    "copy_bandwidth": float,  # bytes/s, measured in the run that measured the row
    "launch_us": float,  # a kernel that does nothing, likewise
    "floor_us": float,
    "median_us": float,
    "p10_us": float,
    "p90_us": float,
    "samples": int,
    "floor_fraction": float,  # floor_us / median_us: share of the measured copy bandwidth
}
ABSENT_COLUMNS: dict[str, type] = {"kernel": str, **SHAPE_COLUMNS, "implementation": str, "reason": str}


def measure(cell: Cell, config: BenchConfig, machine: Machine) -> tuple[list[Row], list[Row]]:
    """Check and time every implementation of a cell; returns rows of `COLUMNS` and of `ABSENT_COLUMNS`.

    A time is taken only where the check has passed.
    """
    empty: Row = dict.fromkeys(COLUMNS) | cell.columns | {"config": ""}
    try:
        case = CASES[cell.kernel](cell, config, machine)
    except NoRoomError as error:
        return [empty | {"implementation": "none", "status": "no room", "config": str(error)}], []
    common = empty | {
        "floor_bytes": case.floor_bytes,
        "copies": case.copies,
        "cold": case.cold,
        "copy_bandwidth": machine.copy_bandwidth,
        "launch_us": machine.launch_us,
        "floor_us": 1e6 * case.floor_bytes / machine.copy_bandwidth,
    }
    rows = [common | _measure_one(contender, common["floor_us"], machine) for contender in case.contenders]
    absent = [
        cell.columns | {"implementation": name, "reason": reason} for name, reason in case.absent.items()
    ]
    return rows, absent


def _measure_one(contender: Contender, floor_us: float, machine: Machine) -> dict[str, Any]:
    named = {"implementation": contender.name, "chosen": contender.chosen, "config": contender.detail}
    try:
        check = contender.check()
        checked = {"error": check.error, "checked_groups": check.checked, "groups": check.groups}
        if not check.passed:
            return named | checked | {"status": "wrong"}
        timing = machine.timer(contender.launches)
    except FAILURES as error:
        if machine.device.type == "cuda":
            torch.cuda.synchronize()  # raises if no other kernel can run any more either
        return named | {"status": "failed", "config": " ".join(str(error).split())[:200]}
    return named | checked | {
        "status": "ok",
        "median_us": timing.median_us,
        "p10_us": timing.p10_us,
        "p90_us": timing.p90_us,
        "samples": timing.samples,
        "floor_fraction": floor_us / timing.median_us,
    }  # fmt: skip
