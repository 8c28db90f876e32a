"""Trials as rows of a table, and the configurations that they speak for as files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from page4.experiments.atomic import write_text
from page4.experiments.autotune.choice import OUTCOMES, Trial, choose
from page4.experiments.autotune.problem import Cell
from page4.experiments.samples import Row
from page4.kernels.tunable import TUNABLE, get_tunable
from page4.kernels.tuning_file import Entry, TuningFile, read_tuning_file, tuning_path

STEP_COLUMNS: dict[str, type] = {
    "requests": int,
    "rows": int,
    "query_heads": int,
    "kv_heads": int,
    "head_dim": int,
    "context": int,
    "overlap": float,
    "kv_format": str,
}
TRIAL_COLUMNS: dict[str, type] = {
    "kernel": str,
    **STEP_COLUMNS,
    "config": str,  # JSON
    "default": bool,
    "outcome": str,
    "median_us": float,
    "note": str,
    "measured": str,
}
TRIAL_KEY = ("kernel", *STEP_COLUMNS, "config")


def cell_columns(cell: Cell) -> Row:
    """The columns that name a cell."""
    return {"kernel": cell.kernel} | {name: getattr(cell.step, name) for name in STEP_COLUMNS}


def trial_rows(cell: Cell, trials: Iterable[Trial], default: Any, day: str) -> list[Row]:
    """A cell's trials as rows of `trials.csv`."""
    return [
        cell_columns(cell)
        | {
            "config": json.dumps(dataclasses.asdict(trial.config)),
            "default": trial.config == default,
            "outcome": trial.outcome,
            "median_us": trial.median_us,
            "note": trial.note,
            "measured": day,
        }
        for trial in trials
    ]


@dataclasses.dataclass(frozen=True)
class Result:
    """What the trials of a cell came to.

    Attributes:
        entry: to be recorded; None where the default configuration itself could not be timed.
        counts: trials by outcome.
    """

    cell: Cell
    entry: Entry | None
    counts: Mapping[str, int]


def results(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Result]:
    """The results of those cells that have rows, in the cells' order."""
    return [_result(cell, own) for cell, own in rows_by_cell(cells, rows, TRIAL_KEY[:-1])]


def rows_by_cell(
    cells: Sequence[Cell], rows: Sequence[Row], key: Sequence[str]
) -> Iterator[tuple[Cell, list[Row]]]:
    """Those cells that have rows, in the cells' order, with them; ``key`` names the columns of a cell."""
    by_cell: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        by_cell.setdefault(tuple(row[name] for name in key), []).append(row)
    for cell in cells:
        if own := by_cell.get(tuple(cell_columns(cell).values())):
            yield cell, own


def _result(cell: Cell, rows: Sequence[Row]) -> Result:
    make = TUNABLE[cell.kernel].config
    trials = [
        Trial(make(**json.loads(row["config"])), row["outcome"], row["median_us"], row["note"])
        for row in rows
    ]
    (default,) = (trial for trial, row in zip(trials, rows, strict=True) if row["default"])
    best = choose(trials, default.config)
    entry = None
    if best is not None and best.median_us is not None and default.median_us is not None:
        entry = Entry(
            key=cell.key,
            config=best.config,
            median_us=round(best.median_us, 3),
            default_us=round(default.median_us, 3),
            day=rows[0]["measured"],
            conditions={"context": cell.step.context, "overlap": cell.step.overlap},
        )
    counts: dict[str, int] = {name: sum(trial.outcome == name for trial in trials) for name in OUTCOMES}
    return Result(cell, entry, counts)


def record(folder: Path, found: Sequence[Result], gpu: str, triton: str) -> list[Path]:
    """Merge results into the files of a folder; of cells with one key the first, more important one counts.

    Entries of other keys stay. Returns the files.

    Raises:
        InputError: a file that is there cannot be used.
    """
    entries: dict[str, dict[Any, Entry]] = {}
    for result in found:
        if result.entry is not None:
            entries.setdefault(result.cell.kernel, {}).setdefault(result.entry.key, result.entry)
    paths = []
    for name, own in entries.items():
        kernel, path = get_tunable(name), folder / tuning_path(name, gpu, triton)
        file = read_tuning_file(path, kernel) if path.exists() else TuningFile(kernel, gpu, triton, {})
        write_text(path, file.merged(own).text())
        paths.append(path)
    return paths


def table(found: Sequence[Result]) -> str:
    """Results as a Markdown table."""
    lines = [
        "| kernel | step | context | overlap | format | configuration | µs | default | gain | not timed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in found:
        step, entry = result.cell.step, result.entry
        skipped = ", ".join(
            f"{count} {name}" for name, count in result.counts.items() if count and name != "timed"
        )
        name = f"{step.requests} x {step.rows}, {step.query_heads}/{step.kv_heads} x {step.head_dim}"
        measured = ("the default configuration cannot run", "-", "-", "-")
        if entry is not None:
            fields = ", ".join(f"{key} {value}" for key, value in dataclasses.asdict(entry.config).items())
            gain = f"{entry.default_us / entry.median_us:.2f}x"
            measured = (fields, f"{entry.median_us:.2f}", f"{entry.default_us:.2f}", gain)
        cells = (
            result.cell.kernel,
            name,
            step.context,
            step.overlap,
            step.kv_format,
            *measured,
            skipped or "-",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
