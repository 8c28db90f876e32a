"""What is recorded in a folder of configurations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

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


def _words(fields: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(fields).items())
