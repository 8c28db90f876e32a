"""The attribution study from configuration to result folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page4.experiments.acceptance.cells import Cell, plan_cells
from page4.experiments.acceptance.config import AcceptanceConfig
from page4.experiments.acceptance.measure import ROUND_COLUMNS
from page4.experiments.acceptance.prompts import Prompts
from page4.experiments.acceptance.study import check_fits, load_encoder, study_digests
from page4.experiments.attribution.arms import Condition
from page4.experiments.attribution.calibration import Calibration
from page4.experiments.attribution.config import AttributionConfig
from page4.experiments.attribution.measure import Measurer
from page4.experiments.attribution.report import write_report
from page4.experiments.attribution.treatments import Numbers
from page4.experiments.info import CHECKPOINT
from page4.experiments.plots import format_tokens
from page4.experiments.progress import Reporter, Silent
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import SampleStore
from page4.kernels.errors import InputError
from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM

CALIBRATION_FILE = "calibration.json"


def run(config: AttributionConfig, out: Path, progress: Reporter | None = None) -> dict[str, Any]:
    """Measure what is not yet in the folder, summarise everything, and return the content of `summary.json`.

    Args:
        config: The study.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `samples.csv`,
            `calibration.json`, `summary.json`, `summary.csv`, `table.md`, a figure and `provenance.json`.
        progress: Told of every cell, in tokens.

    Raises:
        InputError: The checkpoint, the texts, the configuration or the folder cannot be used.
    """
    config = config.resolve()
    folder = config.model or CHECKPOINT
    measured, conditions = planned(config)
    prompts = Prompts.choose(measured, load_encoder(folder))
    model = Qwen4ExpForCausalLM.from_pretrained(folder, device=config.device, backend="reference")
    with ResultFolder(out, config, study_digests(folder, prompts, None)) as results:
        calibration = Calibration(model, prompts.beginnings(), config.prefill_chunk)
        numbers = _calibrated(results, conditions, calibration)
        measurer = Measurer(model, measured, conditions, prompts, calibration, numbers)
        store = results.samples(ROUND_COLUMNS, ("arm", "length", "prompt", "round"))
        _measure(plan_cells(measured), measurer, store, progress or Silent())
        summary = write_report(results, measured, conditions, store.rows)
        results.finish()
    return summary


def planned(config: AttributionConfig) -> tuple[AcceptanceConfig, list[Condition]]:
    """How a resolved configuration measures rounds, and the conditions that are their arms.

    Raises:
        InputError: There is no such checkpoint, or the rounds do not fit into it.
    """
    described = Qwen4ExpConfig.from_file((config.model or CHECKPOINT) / "config.json")
    conditions = config.conditions(described.qsa_layers)
    measured = config.rounds(conditions)
    check_fits(measured, described)
    return measured, conditions


def _calibrated(
    results: ResultFolder, conditions: Sequence[Condition], calibration: Calibration
) -> dict[str, Numbers]:
    """The numbers of every arm: those in the folder, or new ones.

    Raises:
        InputError: `calibration.json` is there but does not hold them.
    """
    file = results.path / CALIBRATION_FILE
    if not file.exists():
        numbers = {c.arm.name: c.treatment.calibrate(c.arm, calibration) for c in conditions}
        results.write_json(CALIBRATION_FILE, numbers)
        return numbers
    try:
        numbers = json.loads(file.read_text(encoding="utf-8"))
        for condition in conditions:
            of_arm, treatment = numbers[condition.arm.name], condition.treatment
            treatment.scales(of_arm)
            treatment.interventions(of_arm, calibration, seed=0)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{file} does not hold the numbers of all arms: {error}") from error
    return numbers


def _measure(cells: Sequence[Cell], measurer: Measurer, store: SampleStore, progress: Reporter) -> None:
    """Run every cell that has no rows yet."""
    waiting = [cell for cell in cells if measurer.key(cell) not in store]
    total = sum(cell.tokens for cell in cells)
    progress.start(total, total - sum(cell.tokens for cell in waiting))
    for cell in waiting:
        store.add(measurer.rounds(cell))
        progress.advance(f"{cell.arm.name}, {format_tokens(cell.length)} tokens", cell.tokens)
