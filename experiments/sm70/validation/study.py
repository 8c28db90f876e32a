"""Predictions against a real V100, from configuration to a folder to send back."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from page4.experiments.bench.machine import Machine
from page4.experiments.kernel_provenance import study_kernels
from page4.experiments.progress import Reporter, Silent
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.cells import CELL_COLUMNS, cell_label
from page4.experiments.sm70.validation.config import ValidateConfig
from page4.experiments.sm70.validation.measure import (
    COLUMNS,
    KEY,
    measure_attention,
    measure_step_kernel,
)
from page4.experiments.sm70.validation.predictions import ATTENTION, FILES, read_predictions
from page4.experiments.sm70.validation.report import write_report
from page4.experiments.sm70.validation.timing import validation_machine
from page4.kernels.errors import InputError
from page4.kernels.product_check_triton import check_products

V100 = (7, 0)  # compute capability


def require_v100(other_gpu: bool) -> bool:
    """Whether the current GPU is what was predicted.

    Raises:
        InputError: there is no GPU, or another one that was not asked for.
    """
    if not torch.cuda.is_available():
        raise InputError("page4 sm70 validate measures on a V100, and PyTorch sees no GPU")
    capability = torch.cuda.get_device_capability()
    if capability != V100 and not other_gpu:
        name = f"{torch.cuda.get_device_name()} ({capability[0]}.{capability[1]})"
        raise InputError(
            f"page4 sm70 validate needs a V100 (compute capability 7.0), this is {name}; "
            "--allow-other-gpu measures on it all the same and compares nothing"
        )
    return capability == V100


def run(
    config: ValidateConfig,
    out: Path,
    progress: Reporter | None = None,
    machine: Machine | None = None,
    compared: bool = True,
) -> dict[str, Any]:
    """Measure what is not yet in the folder, compare everything, and return the content of `summary.json`.

    Args:
        config: The study.
        out: Result folder, new or begun by the same configuration with the same predictions and kernels'
            configurations. It gets `config.yaml`, `measurements.csv`, `summary.json`, `report.md` and
            `provenance.json`.
        progress: Told of every call.
        machine: Where and how is timed; the GPU of this machine by default, which must multiply rightly.
        compared: Whether the given machine is what was predicted.

    Raises:
        InputError: No V100, a GPU that multiplies wrongly, unusable predictions or an unusable folder.
    """
    progress = progress or Silent()
    if machine is None:
        compared = require_v100(config.other_gpu)
        check_products(torch.device("cuda", torch.cuda.current_device()))
        machine = validation_machine(config.replays)
    predictions = read_predictions(config)
    gpu = torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else "the CPU"
    digests = {f"predictions/{name}": _sha256(config.folder / name) for name in FILES}
    # A folder that is sent back names no path of the machine.
    stored = dataclasses.replace(config, predictions=None) if config.predictions else config
    with (
        study_kernels("triton", config.kernel_configs, machine.device.type) as kernels,
        ResultFolder(out, stored, inputs={**digests, **kernels.digests}) as results,
    ):
        samples = results.samples(COLUMNS, KEY, "measurements.csv")
        steps = _by_step(predictions.attention)
        total = len(steps) + len(predictions.step_kernels)
        waiting = [step for step in steps if (ATTENTION, *_key(step[0])) not in samples]
        calls = [
            row
            for row in predictions.step_kernels
            if (row["kernel"], *(row[name] for name in CELL_COLUMNS), "triton") not in samples
        ]
        progress.start(total, total - len(waiting) - len(calls))
        try:
            for step in waiting:
                samples.add(measure_attention(predictions, step, config, machine, compared))
                progress.advance(f"attention, {cell_label(step[0])}")
            for row in calls:
                samples.add([measure_step_kernel(predictions, row, config, machine, compared)])
                progress.advance(f"{row['kernel']}, {cell_label(row)}")
        finally:  # an interrupted study has a report of what it measured
            summary = write_report(results, samples.rows, predictions, gpu, compared)
        ceilings = {"copy_bandwidth": machine.copy_bandwidth, "launch_us": machine.launch_us}
        results.finish(**ceilings, **kernels.provenance())
    return summary


def _by_step(rows: list[Row]) -> list[list[Row]]:
    """Rows of attention by step: its implementations are measured on the same inputs."""
    steps: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        steps.setdefault(tuple(row[name] for name in CELL_COLUMNS), []).append(row)
    return list(steps.values())


def _key(row: Row) -> tuple[Any, ...]:
    return (*(row[name] for name in CELL_COLUMNS), row["implementation"])


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "none"
