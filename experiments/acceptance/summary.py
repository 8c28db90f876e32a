"""Estimates of a study from its samples alone, so that a summary can be made again from the files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.samples import Row
from page4.experiments.statistics import (
    Estimate,
    Statistic,
    bootstrap,
    difference,
    ratio,
    relative_difference,
    weighted_median,
)

ALL_LENGTHS = "all"
ALL_TEXTS = "all"


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
        estimate: Value and interval. Clusters are prompts; for prefill rates they are batches.
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


_NOT_MEASURED = Estimate(math.nan, math.nan, math.nan, 0)

METRIC_COLUMNS = ("metric", "arm", "length", "text", "position", "unit", "value", "low", "high", "clusters")


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


@dataclass(frozen=True)
class _Counts:
    """Per prompt, in the order of their ids: rounds, accepted tokens, rounds that reached each position."""

    rounds: NDArray[np.int64]  # [N]
    accepted: NDArray[np.int64]  # [N]
    reached: NDArray[np.int64]  # [N, K]


def summarise(config: AcceptanceConfig, rounds: Sequence[Row], generations: Sequence[Row]) -> Metrics:
    """All estimates of a finished study.

    Args:
        config: Resolved.
        rounds: Rows of `samples.csv`; every arm has the same prompts at every length.
        generations: Rows of `generation.csv`.
    """
    estimator = _Estimator(config)
    assert config.lengths is not None
    metrics: list[Metric] = []
    texts = sorted({row["text"] for row in rounds})
    lengths: list[int | str] = [*config.lengths, ALL_LENGTHS]
    for length in lengths:
        chosen = [row for row in rounds if length in (row["length"], ALL_LENGTHS)]
        metrics += estimator.acceptance(chosen, length, ALL_TEXTS)
    for text in texts:
        metrics += estimator.acceptance([row for row in rounds if row["text"] == text], ALL_LENGTHS, text)
    for length in config.lengths:
        metrics += estimator.prefill([row for row in rounds if row["length"] == length], length)
        metrics += estimator.generation([row for row in generations if row["length"] == length], length)
    return Metrics(metrics)


class _Estimator:
    def __init__(self, config: AcceptanceConfig) -> None:
        self._config = config
        self._arms = config.all_arms

    def _estimate(self, statistic: Statistic, clusters: int) -> Estimate:
        config = self._config
        return bootstrap(
            statistic, clusters, resamples=config.resamples, confidence=config.confidence, seed=config.seed
        )

    def acceptance(self, rows: Sequence[Row], length: int | str, text: str) -> list[Metric]:
        """Acceptance, also by draft position, and tokens per step: of every arm, and against the baseline."""
        drafts = self._config.num_draft_tokens
        counts = {arm: self._counts(arm, rows) for arm in self._arms}
        metrics: list[Metric] = []

        def add(name: str, arm: Arm, unit: str, statistic: Statistic, position: int | None = None) -> None:
            estimate = self._estimate(statistic, len(counts[arm].rounds))
            if unit in ("points", "percent"):
                estimate = estimate.scaled(100)
            metrics.append(Metric(name, arm.name, length, text, position, unit, estimate))

        mean = {arm: ratio(c.accepted, c.rounds * drafts) for arm, c in counts.items()}
        emitted = {arm: ratio(c.accepted + c.rounds, c.rounds) for arm, c in counts.items()}
        for arm in self._arms:
            add("acceptance", arm, "fraction", mean[arm])
            add("tokens_per_step", arm, "tokens", emitted[arm])
        for arm in self._arms[1:]:
            base = self._config.baseline
            add("acceptance_difference", arm, "points", difference(mean[arm], mean[base]))
            add("acceptance_change", arm, "percent", relative_difference(mean[arm], mean[base]))
            add("tokens_per_step_change", arm, "percent", relative_difference(emitted[arm], emitted[base]))
        for index in range(drafts if text == ALL_TEXTS else 0):
            share = {arm: ratio(c.reached[:, index], c.rounds) for arm, c in counts.items()}
            for arm in self._arms:
                add("acceptance_at", arm, "fraction", share[arm], index + 1)
            for arm in self._arms[1:]:
                against = difference(share[arm], share[self._arms[0]])
                add("acceptance_at_difference", arm, "points", against, index + 1)
        return metrics

    def prefill(self, rows: Sequence[Row], length: int) -> list[Metric]:
        """Prefill tokens per second, the median over batches."""
        rates = {arm.name: self._prefill_rates(arm, rows) for arm in self._arms}
        return self._timings("prefill_rate", "tokens/s", rates, length)

    def generation(self, rows: Sequence[Row], length: int) -> list[Metric]:
        """Speed of free generation, the median over prompts, and acceptance of what did not degenerate."""
        if not rows:
            return []
        by_arm = {arm.name: [row for row in rows if row["arm"] == arm.name] for arm in self._arms}
        metrics: list[Metric] = []
        for name, column, unit in (
            ("decode_rate", "decode_tokens_per_s", "tokens/s"),
            ("step_p50", "step_p50_ms", "ms"),
            ("step_p90", "step_p90_ms", "ms"),
        ):
            values = {arm: np.array([row[column] for row in of_arm]) for arm, of_arm in by_arm.items()}
            metrics += self._timings(name, unit, values, length)
        for arm, of_arm in by_arm.items():
            kept = [row for row in of_arm if not is_degenerate(self._config, row)]
            if kept:
                drafted = [row["steps"] * self._config.num_draft_tokens for row in kept]
                estimate = self._estimate(ratio([row["accepted"] for row in kept], drafted), len(kept))
                metrics.append(
                    Metric("generation_acceptance", arm, length, ALL_TEXTS, None, "fraction", estimate)
                )
        return metrics

    def _timings(
        self, name: str, unit: str, values: dict[str, NDArray[np.float64]], length: int
    ) -> list[Metric]:
        """Medians, and medians of the quotients to the baseline's value of the same batch or prompt."""
        base = values[self._arms[0].name]
        metrics = []
        for arm in self._arms:
            median = self._estimate(weighted_median(values[arm.name]), len(base))
            metrics.append(Metric(name, arm.name, length, ALL_TEXTS, None, unit, median))
        for arm in self._arms[1:]:
            change = self._estimate(weighted_median(values[arm.name] / base - 1), len(base)).scaled(100)
            metrics.append(Metric(f"{name}_change", arm.name, length, ALL_TEXTS, None, "percent", change))
        return metrics

    def _counts(self, arm: Arm, rows: Sequence[Row]) -> _Counts:
        by_prompt: dict[str, list[int]] = {}
        for row in sorted((row for row in rows if row["arm"] == arm.name), key=lambda row: row["prompt"]):
            by_prompt.setdefault(row["prompt"], []).append(row["accepted"])
        positions = np.arange(1, self._config.num_draft_tokens + 1)
        samples = [np.array(accepted) for accepted in by_prompt.values()]
        return _Counts(
            rounds=np.array([len(accepted) for accepted in samples]),
            accepted=np.array([accepted.sum() for accepted in samples]),
            reached=np.array([(accepted[:, None] >= positions).sum(axis=0) for accepted in samples]),
        )

    def _prefill_rates(self, arm: Arm, rows: Sequence[Row]) -> NDArray[np.float64]:
        batches = {
            row["batch"]: row["prefill_tokens"] / row["prefill_seconds"]
            for row in rows
            if row["arm"] == arm.name
        }
        return np.array([batches[batch] for batch in sorted(batches)])


def is_degenerate(config: AcceptanceConfig, row: Row) -> bool:
    """Whether a free continuation repeats itself too much for its acceptance to mean anything."""
    return bool(row["repeated_4grams"] > config.max_repeated_4grams)


def checks_summary(checks: Sequence[Row]) -> dict[str, Any]:
    """Per control and arm: prompts, compared items, and how many differ."""
    summary: dict[str, Any] = {}
    for row in checks:
        of_arm = summary.setdefault(row["check"], {}).setdefault(
            row["arm"], {"prompts": 0, "compared": 0, "mismatches": 0}
        )
        of_arm["prompts"] += 1
        of_arm["compared"] += row["compared"]
        of_arm["mismatches"] += row["mismatches"]
    return summary
