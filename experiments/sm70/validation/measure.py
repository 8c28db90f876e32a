"""Predictions beside measurements of the same calls, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import BenchConfig, Kernel
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.measure import measure
from page4.experiments.kernel_cases import StepShape
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.cells import CELL_COLUMNS
from page4.experiments.sm70.prediction.config import StepKernel
from page4.experiments.sm70.validation.config import ValidateConfig
from page4.experiments.sm70.validation.predictions import ATTENTION, Predictions

KEY = ("kernel", *CELL_COLUMNS, "implementation")
COLUMNS: dict[str, type] = {
    "kernel": str,  # attention (with merge), or a call beside it
    **CELL_COLUMNS,
    "implementation": str,
    "status": str,  # of the measurement: ok, wrong, failed, no room, or absent: it cannot run here
    "config": str,  # that was measured, or why nothing was
    "predicted_config": str,
    "error": float,  # largest error over what is permitted
    "checked_groups": int,
    "groups": int,
    "predicted_us": float,
    "measured_us": float,  # median, less launch_us
    "p10_us": float,  # likewise
    "p90_us": float,
    "samples": int,
    "launch_us": float,  # an empty call, timed alike
    "floor_us": float,  # of the predicted GPU
    "ratio": float,  # measured_us / predicted_us; none on another GPU
}

_BENCHES: dict[StepKernel, Kernel] = {
    "prepare": "qsa_prepare",
    "scores": "index_scores",
    "select": "block_select",
    "verify": "mtp_verify_sampled",
    "gdn": "gated_delta",
}


def measure_attention(
    predictions: Predictions, rows: Sequence[Row], config: ValidateConfig, machine: Machine, compared: bool
) -> list[Row]:
    """Measure the implementations of one step that have predictions; ``rows`` are these."""
    shape = predictions.shape(rows[0])
    names = tuple(row["implementation"] for row in rows)
    measured, absent = measure(Cell("page4_attention", shape), _bench_config(shape, config, names), machine)
    found = {row["implementation"]: row for row in measured}
    missing = {row["implementation"]: row["reason"] for row in absent}
    return [
        _row(ATTENTION, row, found.get(name) or found.get("none"), missing.get(name, ""), compared)
        for name, row in zip(names, rows, strict=True)
    ]


def measure_step_kernel(
    predictions: Predictions, row: Row, config: ValidateConfig, machine: Machine, compared: bool
) -> Row:
    """Measure one of the other calls of a step."""
    shape, kernel = predictions.shape(row), row["kernel"]
    bench = _bench_config(shape, config, ("triton",))
    (measured,), _ = measure(Cell(_BENCHES[kernel], shape), bench, machine)
    return _row(kernel, row | {"implementation": "triton", "config": ""}, measured, "", compared)


def _bench_config(shape: StepShape, config: ValidateConfig, names: Sequence[Any]) -> BenchConfig:
    return BenchConfig(
        implementations=tuple(names),
        head_dim=shape.head_dim,
        topk=shape.topk,
        max_copies=1,
        check_groups=config.check_groups,
        replays=config.replays,
        seed=config.seed,
    )


def _row(kernel: str, prediction: Row, measured: Row | None, reason: str, compared: bool) -> Row:
    """A prediction and its measurement; without one ``reason`` says why."""
    row: Row = {name: "" if kind is str else None for name, kind in COLUMNS.items()}
    row |= {name: prediction[name] for name in CELL_COLUMNS}
    row |= {
        "kernel": kernel,
        "implementation": prediction["implementation"],
        "predicted_config": prediction["config"],
        "predicted_us": prediction["predicted_us"],
        "floor_us": prediction["floor_us"],
    }
    if measured is None:
        return row | {"status": "absent", "config": reason}
    row |= {name: measured[name] for name in ("status", "config", "error", "checked_groups", "groups")}
    if measured["status"] != "ok":
        return row
    launch = measured["launch_us"]
    times = {name: measured[name] - launch for name in ("median_us", "p10_us", "p90_us")}
    return row | {
        "measured_us": times["median_us"],
        "p10_us": times["p10_us"],
        "p90_us": times["p90_us"],
        "samples": measured["samples"],
        "launch_us": launch,
        "ratio": times["median_us"] / prediction["predicted_us"] if compared else None,
    }
