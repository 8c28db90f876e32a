"""What is recorded in a folder of configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from page4.experiments.strip_plot import Point, plot_strips
from page4.kernels.tunable import get_tunable
from page4.kernels.tuning import SHIPPED_FOLDER
from page4.kernels.tuning_file import TuningFile, read_tuning_file


def shipped_files(folder: Path = SHIPPED_FOLDER) -> list[TuningFile]:
    """Every file of the folder, in the order of their paths.

    Raises:
        InputError: a file that cannot be used, or is named after no tunable kernel.
    """
    return [read_tuning_file(file, get_tunable(file.stem)) for file in sorted(folder.rglob("*.json"))]


def entry_rows(file: TuningFile) -> list[dict[str, str]]:
    """A row for every entry of a file: the call's shape, the configuration and its times, as text."""
    return [
        {
            "call": _words(entry.key),
            "configuration": _words(entry.config),
            "us": f"{entry.median_us:.1f}",
            "by rule, us": f"{entry.default_us:.1f}",
            "day": f"{entry.basis} {entry.day}",
        }
        for _, entry in sorted(file.entries.items(), key=lambda item: dataclasses.astuple(item[0]))
    ]


def plot_gains(files: Sequence[TuningFile]) -> Figure:
    """Time by rule over the time of the recorded configuration, a row per kernel and a point per entry."""
    points = [
        Point(file.kernel.name, f"{file.gpu}, {entry.basis}", entry.default_us / entry.median_us)
        for file in files
        for entry in file.entries.values()
    ]
    return plot_strips(
        points,
        1,
        "time by rule over time as recorded",
        "What recorded configurations gain",
        "a point per entry; at 1 the rule is as fast as what is recorded",
    )


def _words(fields: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(fields).items())
