"""The estimated quantities of a study, and where to find one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from page4.experiments.samples import Row, read_samples
from page4.experiments.statistics import Estimate

ALL_LENGTHS = "all"
ALL_TEXTS = "all"

METRIC_COLUMNS: dict[str, type] = {
    "metric": str,
    "arm": str,
    "length": str,
    "text": str,
    "position": int,
    "unit": str,
    "value": float,
    "low": float,
    "high": float,
    "clusters": int,
}
"""Of `summary.csv`, whose length is a number of tokens or "all"."""

_NOT_MEASURED = Estimate(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Metric:
    """One estimated quantity and what it is about.

    Attributes:
        name: The quantity. `<name>_difference` and `<name>_change` compare an arm with the baseline on the
            same prompts: arm - baseline and arm / baseline - 1. `<name>_over_texts` has the same value, and
            an interval over texts.
        arm: The arm.
        length: Context length in tokens, or "all" of them together.
        text: Name of a text, or "all".
        position: Draft position 1..K; None where the quantity is about the whole round.
        unit: "fraction", "points" (percentage points), "percent", "tokens", "tokens/s" or "ms".
        estimate: Value and interval. Clusters are prompts; for speeds of rounds they are batches of prompts,
            and for `<name>_over_texts` they are texts.
    """

    name: str
    arm: str
    length: int | str
    text: str
    position: int | None
    unit: str
    estimate: Estimate

    def to_row(self) -> Row:
        """A flat record for `summary.csv` and `summary.json`."""
        about = {"metric": self.name, "arm": self.arm, "length": self.length, "text": self.text}
        return about | {"position": self.position, "unit": self.unit} | self.estimate.to_json()

    @classmethod
    def from_row(cls, row: Row) -> Metric:
        """The metric of a row of `summary.csv`."""
        length = row["length"] if row["length"] == ALL_LENGTHS else int(row["length"])
        about = (row["metric"], row["arm"], length, row["text"], row["position"], row["unit"])
        return cls(*about, Estimate.from_json(row))


class Metrics:
    """The metrics of a study, found by what they are about."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.all = list(metrics)
        self._found = {(m.name, m.arm, m.length, m.text, m.position): m.estimate for m in self.all}

    @classmethod
    def read(cls, file: Path) -> Metrics:
        """The metrics that a study left in its `summary.csv`.

        Raises:
            InputError: Other columns, or a cell that is not of its column's type.
        """
        return cls(map(Metric.from_row, read_samples(file, METRIC_COLUMNS)))

    @property
    def texts(self) -> list[str]:
        """Names of the texts, ascending."""
        return sorted({metric.text for metric in self.all} - {ALL_TEXTS})

    def get(
        self, name: str, arm: str, length: int | str, position: int | None = None, text: str = ALL_TEXTS
    ) -> Estimate:
        """The estimate; all NaN, of no clusters, when the study did not measure it."""
        return self._found.get((name, arm, length, text, position), _NOT_MEASURED)
