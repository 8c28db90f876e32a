"""Tuning for a V100 without one: predictions from configuration to files of configurations."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from page4.experiments.autotune.predicted_config import PredictedTuningConfig
from page4.experiments.autotune.predicted_trials import (
    PREDICTED_OUTCOMES,
    PredictedTrial,
    best_of,
    fastest_of,
    try_predicted,
)
from page4.experiments.autotune.problem import Cell
from page4.experiments.autotune.problems import problems_on
from page4.experiments.autotune.record import STEP_COLUMNS, Result, cell_columns, record, rows_by_cell
from page4.experiments.autotune.study import plan_cells
from page4.experiments.progress import Reporter, Silent
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row
from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.toolchain import VERSION, side_install
from page4.kernels.errors import InputError
from page4.kernels.tunable import TUNABLE
from page4.kernels.tuning_file import Entry

GPU = "V100"
TRITON = ".".join(VERSION.split(".")[:2])
COLUMNS: dict[str, type] = {
    "kernel": str,
    **STEP_COLUMNS,
    "config": str,  # JSON
    "default": bool,
    "outcome": str,
    "predicted_us": float,
    "registers": int,
    "note": str,
    "predicted": str,  # the day
    "code": str,  # digest of what the configuration launches
}
KEY = ("kernel", *STEP_COLUMNS, "config")

Try = Callable[[Cell, Mapping[str, PredictedTrial], Any | None], tuple[Any, list[PredictedTrial]]]

NOTE = (
    "Nothing was measured: times are predicted for a V100 from machine code of Triton {triton}, without "
    "launching. Configurations predicted within 15 % of the fastest tie with it, and of those the one with "
    "the fewest registers is recorded, then the fastest; the column `fastest` says what that costs if the "
    "prediction is exact."
)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A cell's trials and what they came to."""

    cell: Cell
    trials: list[PredictedTrial]
    default: PredictedTrial
    day: str

    @property
    def entry(self) -> Entry | None:
        """To be recorded; None where the default configuration has no prediction."""
        best = best_of(self.trials)
        if best is None or best.us is None or self.default.us is None:
            return None
        return Entry(
            key=self.cell.key,
            config=best.config,
            median_us=round(best.us, 3),
            default_us=round(self.default.us, 3),
            day=self.day,
            conditions={"context": self.cell.step.context, "overlap": self.cell.step.overlap},
            predicted=True,
        )

    @property
    def counts(self) -> dict[str, int]:
        """Trials by outcome."""
        return {name: sum(t.outcome == name for t in self.trials) for name in PREDICTED_OUTCOMES}


def run(
    config: PredictedTuningConfig,
    out: Path,
    progress: Reporter | None = None,
    try_cell: Try | None = None,
) -> dict[str, Any]:
    """Predict what is not yet in the folder, record it, and return the content of `summary.json`.

    Args:
        config: What to tune.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `trials.csv` (every
            configuration tried), `table.md`, `summary.json`, `provenance.json` and, unless the configuration
            names another folder, `configs`. Trials count as long as what they launch, its code and the model
            do not change.
        progress: Told of every kernel at every step.
        try_cell: Makes a cell's trials, of which it gets the known ones, and the only configuration to try if
            there is one; see :func:`~page4.experiments.autotune.predicted_trials.try_predicted`.

    Raises:
        InputError: The Triton for sm_70 is missing, nothing can be tuned, or the folder cannot be used.
    """
    progress = progress or Silent()
    cells = plan_cells(config, problems_on((7, 0)))
    if not cells:
        raise InputError("none of these kernels reads any of these KV formats")
    configs = config.configs or out / "configs"
    with ResultFolder(out, dataclasses.replace(config, configs=None)) as folder, ExitStack() as stack:
        trials = folder.samples(COLUMNS, KEY, "trials.csv")
        if try_cell is None:
            compiler = stack.enter_context(closing(Compiler(side_install())))
            try_cell = functools.partial(try_predicted, compiler=compiler, config=config, spilling=set())
        progress.start(len(cells))
        for cell in cells:
            found = _results(cells, trials.rows)
            earlier = [trial for one in found if one.cell == cell for trial in one.trials]
            known = {trial.code: trial for trial in earlier}
            default, tried = try_cell(cell, known, _leader(cell, config, found))
            if tried != earlier:
                trials.remove(functools.partial(_is_of, cell))
                trials.add(_rows(cell, tried, default))
                _record(configs, _results(cells, trials.rows))
            progress.advance(str(cell))
        found = _results(cells, trials.rows)
        files = _record(configs, found)
        counts = {name: sum(one.counts[name] for one in found) for name in PREDICTED_OUTCOMES}
        summary = {
            "study": "autotune for sm70",
            "measured": False,
            "tuned": sum(one.entry is not None for one in found),
            "trials": counts,
            "files": [file.relative_to(configs).as_posix() for file in files],
        }
        folder.write_text("table.md", table(found))
        folder.write_json("summary.json", summary)
        folder.finish(triton=VERSION)
    return summary


def _leader(cell: Cell, config: PredictedTuningConfig, found: Sequence[_Found]) -> Any | None:
    """For a format that follows the first one: what is recorded for that; None for others."""
    if cell.step.kv_format not in config.followers:
        return None
    step = dataclasses.replace(cell.step, kv_format=config.kv_formats[0])
    entries = [one.entry for one in found if one.cell == Cell(cell.problem, step)]
    return entries[0].config if entries and entries[0] is not None else None


def _is_of(cell: Cell, row: Row) -> bool:
    return all(row[name] == value for name, value in cell_columns(cell).items())


def _rows(cell: Cell, trials: Sequence[PredictedTrial], default: Any) -> list[Row]:
    day = datetime.now(UTC).date().isoformat()
    return [
        cell_columns(cell)
        | {
            "config": json.dumps(dataclasses.asdict(trial.config)),
            "default": trial.config == default,
            "outcome": trial.outcome,
            "predicted_us": trial.us,
            "registers": trial.registers,
            "note": trial.note,
            "predicted": day,
            "code": trial.code,
        }
        for trial in trials
    ]


def _results(cells: Sequence[Cell], rows: Sequence[Row]) -> list[_Found]:
    """The cells that have rows, in the cells' order."""
    return [_found(cell, own) for cell, own in rows_by_cell(cells, rows, KEY[:-1])]


def _found(cell: Cell, rows: Sequence[Row]) -> _Found:
    make = TUNABLE[cell.kernel].config
    trials = [
        PredictedTrial(
            make(**json.loads(row["config"])),
            row["outcome"],
            row["predicted_us"],
            row["registers"],
            row["note"],
            row["code"],
        )
        for row in rows
    ]
    (default,) = (trial for trial, row in zip(trials, rows, strict=True) if row["default"])
    return _Found(cell, trials, default, rows[0]["predicted"])


def _record(folder: Path, found: Sequence[_Found]) -> list[Path]:
    return record(folder, [Result(one.cell, one.entry, one.counts) for one in found], GPU, TRITON)


def table(found: Sequence[_Found]) -> str:
    """Results as a Markdown table, with what the times are."""
    lines = [
        "| kernel | step | format | configuration | us | registers | fastest, us | by rule, us | left out |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        step, best, fastest = one.cell.step, best_of(one.trials), fastest_of(one.trials)
        left_out = ", ".join(f"{one.counts[name]} {name}" for name in PREDICTED_OUTCOMES[1:])
        name = f"{step.requests} x {step.rows}, {step.query_heads}/{step.kv_heads} x {step.head_dim}"
        chosen = ["nothing could be predicted", "-", "-", "-"]
        if best is not None and fastest is not None:
            fields = ", ".join(f"{key} {value}" for key, value in dataclasses.asdict(best.config).items())
            chosen = [fields, f"{best.us:.1f}", str(best.registers), f"{fastest.us:.1f}"]
        rule = "-" if one.default.us is None else f"{one.default.us:.1f}"
        cells = (one.cell.kernel, name, step.kv_format, *chosen, rule, left_out)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n" + NOTE.format(triton=VERSION) + "\n"
