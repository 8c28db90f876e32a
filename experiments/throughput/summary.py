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
    "against": str,
    "length": int,
    "value": float,
    "low": float,
    "high": float,
    "clusters": int,
    "change_value": float,
    "change_low": float,
    "change_high": float,
}
"""Of `summary.csv`; a baseline's row has no change, an arm has a row for every arm that it is against."""


@dataclass(frozen=True)
class Figure:
    """An estimate and what it is of; `change` is relative to `against` on the same prompts, in percent.

    `against` names another arm; of the baseline it and `change` are None.
    """

    quantity: str
    arm: str
    against: str | None
    length: int
    value: Estimate
    change: Estimate | None

    @property
    def key(self) -> tuple[str, str, str | None, int]:
        """What it is of: quantity, arm, against and length."""
        return self.quantity, self.arm, self.against, self.length

    def to_row(self) -> Row:
        """A row of `summary.csv`."""
        row: Row = dict(zip(("quantity", "arm", "against", "length"), self.key, strict=True))
        row |= {name: self.value.to_json()[name] for name in ("value", "low", "high", "clusters")}
        change = self.change.to_json() if self.change is not None else {}
        return row | {f"change_{name}": change.get(name) for name in ("value", "low", "high")}

    @classmethod
    def from_row(cls, row: Row) -> Figure:
        """The estimate of a row of `summary.csv`."""
        change = None
        if row["against"]:
            fields = {name: row[f"change_{name}"] for name in ("value", "low", "high")}
            change = Estimate.from_json(fields | {"clusters": row["clusters"]})
        about = (row["quantity"], row["arm"], row["against"] or None, row["length"])
        return cls(*about, Estimate.from_json(row), change)


def figures(config: ThroughputConfig, rows: Sequence[Row]) -> Iterator[Figure]:
    """Every quantity of the baseline, and of every comparison, at every length."""
    pairs = [(config.all_arms[0].name, None), *((arm.name, other.name) for arm, other in config.comparisons)]
    quantities = [name for name in (*TIMES, *COUNTS) if not config.public_layers or name not in OF_TEXT]
    for length in config.lengths or ():
        by_arm = {
            arm.name: [row for row in rows if row["arm"] == arm.name and row["length"] == length]
            for arm in config.all_arms
        }
        for quantity in quantities:
            for arm, against in pairs:
                own = by_arm[arm]
                value = _estimate(config, _statistic(quantity, own), len(own))
                change = None
                if against is not None:
                    change = _estimate(config, _change(quantity, own, by_arm[against]), len(own)).scaled(100)
                yield Figure(quantity, arm, against, length, value, change)


def _statistic(quantity: str, rows: Sequence[Row]) -> Statistic:
    if quantity in TIMES:
        return weighted_median(_values(quantity, rows))
    accepted, drafted = ([row[name] for row in rows] for name in ("accepted", "drafted"))
    if quantity == "acceptance":
        return ratio(accepted, drafted)
    return ratio([row["decode_tokens"] for row in rows], [row["steps"] for row in rows])


def _change(quantity: str, rows: Sequence[Row], others: Sequence[Row]) -> Statistic:
    """The median of the prompts' own changes, or the change of the sums; the arms' rows share their order."""
    if quantity in TIMES:
        return weighted_median(_values(quantity, rows) / _values(quantity, others) - 1)
    return relative_difference(_statistic(quantity, rows), _statistic(quantity, others))


def _values(quantity: str, rows: Sequence[Row]) -> Array:
    return np.array([TIMES[quantity](row) for row in rows], np.float64)


def _estimate(config: ThroughputConfig, statistic: Statistic, prompts: int) -> Estimate:
    return bootstrap(
        statistic, prompts, resamples=config.resamples, confidence=config.confidence, seed=config.seed
    )
