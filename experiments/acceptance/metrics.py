"""The estimated quantities of a study, and where to find one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from page4.experiments.samples import Row
from page4.experiments.statistics import Estimate

ALL_LENGTHS = "all"
ALL_TEXTS = "all"

METRIC_COLUMNS = ("metric", "arm", "length", "text", "position", "unit", "value", "low", "high", "clusters")

_NOT_MEASURED = Estimate(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Metric:
    """One estimated quantity and what it is about.

    Attributes:
        name: The quantity. `<name>_difference` and `<name>_change` compare an arm with the baseline on the
            same prompts: arm - baseline and arm / baseline - 1.
        arm: The arm.
        length: Context length in tokens, or "all" of them together.
        text: Name of a text, or "all".
        position: Draft position 1..K; None where the quantity is about the whole round.
        unit: "fraction", "points" (percentage points), "percent", "tokens", "tokens/s" or "ms".
        estimate: Value and interval. Clusters are prompts; for speeds of rounds they are batches of prompts.
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


class Metrics:
    """The metrics of a study, found by what they are about."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.all = list(metrics)
        self._found = {(m.name, m.arm, m.length, m.text, m.position): m.estimate for m in self.all}

    @property
    def texts(self) -> list[str]:
        """Names of the texts, ascending."""
        return sorted({metric.text for metric in self.all} - {ALL_TEXTS})

    def get(
        self, name: str, arm: str, length: int | str, position: int | None = None, text: str = ALL_TEXTS
    ) -> Estimate:
        """The estimate; all NaN, of no clusters, when the study did not measure it."""
        return self._found.get((name, arm, length, text, position), _NOT_MEASURED)
