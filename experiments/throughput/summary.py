"""Rates and changes of the throughput study, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from page4.experiments.samples import Row
from page4.experiments.statistics import (
    Array,
    Estimate,
    Statistic,
    bootstrap,
    ratio,
    relative_difference,
    weighted_median,
)
from page4.experiments.throughput.config import ThroughputConfig

TIMES: dict[str, Callable[[Row], float]] = {
    "prefill": lambda row: row["prefill_tokens"] / row["prefill_seconds"],
    "decode": lambda row: row["decode_tokens"] / row["decode_seconds"],
    "step_p50": lambda row: row["step_p50_ms"],
    "step_p90": lambda row: row["step_p90_ms"],
}
"""Medians over prompts: tokens/s, and milliseconds of a prompt's median and 90th percentile step."""

COUNTS = ("tokens_per_step", "acceptance")
"""Sums over prompts: of tokens over steps, and of accepted over drafted tokens."""

OF_TEXT = ("decode", *COUNTS)
"""What means nothing where weights are random."""


COLUMNS: dict[str, type] = {
    "quantity": str,
    "arm": str,
    "length": int,
    "value": float,
    "low": float,
    "high": float,
    "clusters": int,
    "change_value": float,
    "change_low": float,
    "change_high": float,
}
"""Of `summary.csv`; a baseline's row has no change."""


@dataclass(frozen=True)
class Figure:
    """An estimate and what it is of; `change` is relative to the baseline on the same prompts, in percent."""

    quantity: str
    arm: str
    length: int
    value: Estimate
    change: Estimate | None

    def to_row(self) -> Row:
        """A row of `summary.csv`."""
        row: Row = {"quantity": self.quantity, "arm": self.arm, "length": self.length}
        row |= {name: self.value.to_json()[name] for name in ("value", "low", "high", "clusters")}
        change = self.change.to_json() if self.change is not None else {}
        return row | {f"change_{name}": change.get(name) for name in ("value", "low", "high")}

    @classmethod
    def from_row(cls, row: Row, baseline: str) -> Figure:
        """The estimate of a row of `summary.csv`; `baseline` names the arm without changes."""
        change = None
        if row["arm"] != baseline:
            fields = {name: row[f"change_{name}"] for name in ("value", "low", "high")}
            change = Estimate.from_json(fields | {"clusters": row["clusters"]})
        return cls(row["quantity"], row["arm"], row["length"], Estimate.from_json(row), change)


def figures(config: ThroughputConfig, rows: Sequence[Row]) -> Iterator[Figure]:
    """Every quantity of every arm and length."""
    base = config.all_arms[0].name
    quantities = [name for name in (*TIMES, *COUNTS) if not config.public_layers or name not in OF_TEXT]
    for length in config.lengths or ():
        by_arm = {
            arm.name: [row for row in rows if row["arm"] == arm.name and row["length"] == length]
            for arm in config.all_arms
        }
        for quantity in quantities:
            for arm, own in by_arm.items():
                value = _estimate(config, _statistic(quantity, own), len(own))
                change = None
                if arm != base:
                    change = _estimate(config, _change(quantity, own, by_arm[base]), len(own)).scaled(100)
                yield Figure(quantity, arm, length, value, change)


def _statistic(quantity: str, rows: Sequence[Row]) -> Statistic:
    if quantity in TIMES:
        return weighted_median(_values(quantity, rows))
    accepted, drafted = ([row[name] for row in rows] for name in ("accepted", "drafted"))
    if quantity == "acceptance":
        return ratio(accepted, drafted)
    return ratio([row["decode_tokens"] for row in rows], [row["steps"] for row in rows])


def _change(quantity: str, rows: Sequence[Row], base: Sequence[Row]) -> Statistic:
    """The median of the prompts' own changes, or the change of the sums; the arms' rows share their order."""
    if quantity in TIMES:
        return weighted_median(_values(quantity, rows) / _values(quantity, base) - 1)
    return relative_difference(_statistic(quantity, rows), _statistic(quantity, base))


def _values(quantity: str, rows: Sequence[Row]) -> Array:
    return np.array([TIMES[quantity](row) for row in rows], np.float64)


def _estimate(config: ThroughputConfig, statistic: Statistic, prompts: int) -> Estimate:
    return bootstrap(
        statistic, prompts, resamples=config.resamples, confidence=config.confidence, seed=config.seed
    )
