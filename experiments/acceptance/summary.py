"""Estimates of a study from its samples alone, so that a summary can be made again from the files."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.acceptance.metrics import ALL_LENGTHS, ALL_TEXTS, Metric, Metrics
from page4.experiments.samples import Row
from page4.experiments.statistics import (
    LEAST_CLUSTERS,
    Estimate,
    Statistic,
    bootstrap,
    difference,
    ratio,
    relative_difference,
    weighted_median,
)

Array = NDArray[np.float64]


def summarise(config: AcceptanceConfig, rounds: Sequence[Row], generations: Sequence[Row]) -> Metrics:
    """All estimates of a finished study.

    Args:
        config: Resolved.
        rounds: Rows of `samples.csv`; every arm has the same prompts at every length.
        generations: Rows of `generation.csv`.
    """
    estimator = Estimator(config)
    assert config.lengths is not None
    lengths: list[int | str] = [*config.lengths, ALL_LENGTHS]
    metrics: list[Metric] = []
    for length in lengths:
        chosen = [row for row in rounds if length in (row["length"], ALL_LENGTHS)]
        metrics += estimator.acceptance(chosen, length, ALL_TEXTS)
        metrics += estimator.by_position(chosen, length)
        metrics += estimator.by_drafts(chosen, length)
    metrics += estimator.over_texts(rounds, ALL_LENGTHS)
    for text in sorted({row["text"] for row in rounds}):
        for length in lengths:
            of_text = [r for r in rounds if r["text"] == text and length in (r["length"], ALL_LENGTHS)]
            if of_text:  # long contexts may have fewer prompts, and none of this text
                metrics += estimator.acceptance(of_text, length, text)
    for length in config.lengths:
        metrics += estimator.speed([row for row in rounds if row["length"] == length], length)
        metrics += estimator.generation([row for row in generations if row["length"] == length], length)
    return Metrics(metrics)


@dataclass(frozen=True)
class _Counts:
    """Per cluster, in the order of names: rounds, accepted tokens, rounds that reached each position."""

    rounds: NDArray[np.int64]  # [N]
    accepted: NDArray[np.int64]  # [N]
    reached: NDArray[np.int64]  # [N, K]


class Estimator:
    """Makes metrics of rows that belong together: a length, a text."""

    def __init__(self, config: AcceptanceConfig) -> None:
        self._config = config
        self._base = config.baseline
        self._others = config.all_arms[1:]

    def acceptance(self, rows: Sequence[Row], length: int | str, text: str) -> list[Metric]:
        """Acceptance and tokens per step, of every arm and against the baseline."""
        counts = self._counts(rows)
        mean = self._shares(counts)
        emitted = {arm: ratio(c.accepted + c.rounds, c.rounds) for arm, c in counts.items()}
        prompts = len(counts[self._base].rounds)

        def metric(name: str, arm: Arm, unit: str, statistic: Statistic) -> Metric:
            return Metric(name, arm.name, length, text, None, unit, self._estimate(statistic, prompts, unit))

        metrics = [metric("acceptance", arm, "fraction", mean[arm]) for arm in counts]
        metrics += [metric("tokens_per_step", arm, "tokens", emitted[arm]) for arm in counts]
        for arm in self._others:
            of_mean, of_emitted = (mean[arm], mean[self._base]), (emitted[arm], emitted[self._base])
            metrics += [
                metric("acceptance_difference", arm, "points", difference(*of_mean)),
                metric("acceptance_change", arm, "percent", relative_difference(*of_mean)),
                metric("tokens_per_step_change", arm, "percent", relative_difference(*of_emitted)),
            ]
        return metrics

    def over_texts(self, rows: Sequence[Row], length: int | str) -> list[Metric]:
        """Acceptance of every arm and against the baseline, with intervals over texts.

        Prompts of one text overlap, those that end near each other almost wholly, so they are not quite
        independent and an interval over prompts may be too narrow. Texts share nothing. There is nothing to
        say where texts are too few, or have one prompt each.
        """
        counts = self._counts(rows, cluster="text")
        texts = len(counts[self._base].rounds)
        if texts < LEAST_CLUSTERS or texts == len({row["prompt"] for row in rows}):
            return []
        mean = self._shares(counts)
        statistics = [("acceptance_over_texts", arm, "fraction", mean[arm]) for arm in counts]
        for arm in self._others:
            pair = (mean[arm], mean[self._base])
            statistics += [
                ("acceptance_difference_over_texts", arm, "points", difference(*pair)),
                ("acceptance_change_over_texts", arm, "percent", relative_difference(*pair)),
            ]
        return [
            Metric(name, arm.name, length, ALL_TEXTS, None, unit, self._estimate(statistic, texts, unit))
            for name, arm, unit, statistic in statistics
        ]

    def by_position(self, rows: Sequence[Row], length: int | str) -> list[Metric]:
        """Share of rounds whose first j drafts were accepted, of every arm and against the baseline."""
        counts = self._counts(rows)
        prompts = len(counts[self._base].rounds)
        metrics = []
        for index in range(self._config.num_draft_tokens):
            share = {arm: ratio(c.reached[:, index], c.rounds) for arm, c in counts.items()}
            statistics = [("acceptance_at", arm, "fraction", share[arm]) for arm in counts]
            statistics += [
                ("acceptance_at_difference", arm, "points", difference(share[arm], share[self._base]))
                for arm in self._others
            ]
            for name, arm, unit, statistic in statistics:
                estimate = self._estimate(statistic, prompts, unit)
                metrics.append(Metric(name, arm.name, length, ALL_TEXTS, index + 1, unit, estimate))
        return metrics

    def by_drafts(self, rows: Sequence[Row], length: int | str) -> list[Metric]:
        """Acceptance and tokens per step of 1 to K drafts; `position` of these metrics is their number."""
        counts = self._counts(rows)
        prompts = len(counts[self._base].rounds)
        metrics = []
        for drafts in range(1, self._config.num_draft_tokens + 1):
            accepted = {arm: c.reached[:, :drafts].sum(1) for arm, c in counts.items()}
            share = {arm: ratio(accepted[arm], drafts * c.rounds) for arm, c in counts.items()}
            statistics = [("acceptance_of", arm, "fraction", share[arm]) for arm in counts]
            statistics += [
                ("tokens_per_step_of", arm, "tokens", ratio(accepted[arm] + c.rounds, c.rounds))
                for arm, c in counts.items()
            ]
            statistics += [
                ("acceptance_of_difference", arm, "points", difference(share[arm], share[self._base]))
                for arm in self._others
            ]
            for name, arm, unit, statistic in statistics:
                estimate = self._estimate(statistic, prompts, unit)
                metrics.append(Metric(name, arm.name, length, ALL_TEXTS, drafts, unit, estimate))
        return metrics

    def speed(self, rows: Sequence[Row], length: int) -> list[Metric]:
        """Prefill and decode rates and step times of the rounds; a step is a round of the whole batch.

        The first batch of a length is left out where there are others: whoever runs a length first compiles,
        captures and allocates for it, which took up to twenty times as long.
        """
        measures: list[tuple[str, str, Callable[[Sequence[Row]], float]]] = [
            (
                "prefill_rate",
                "tokens/s",
                lambda batch: batch[0]["prefill_tokens"] / batch[0]["prefill_seconds"],
            ),
            ("decode_rate", "tokens/s", lambda batch: _emitted(batch) / float(_steps(batch).sum())),
            ("step_p50", "ms", lambda batch: 1000 * float(np.quantile(_steps(batch), 0.5))),
            ("step_p90", "ms", lambda batch: 1000 * float(np.quantile(_steps(batch), 0.9))),
        ]
        metrics = []
        first = min((row["batch"] for row in rows), default=0)
        warm = [row for row in rows if row["batch"] != first] or rows
        batches = {arm: _grouped(_of(arm, warm), "batch") for arm in self._config.all_arms}
        for name, unit, measure in measures:
            values = {arm: np.array([measure(batch) for batch in b.values()]) for arm, b in batches.items()}
            metrics += self._medians(name, unit, values, length)
        return metrics

    def generation(self, rows: Sequence[Row], length: int) -> list[Metric]:
        """Speed of free generation, and acceptance of the continuations that did not degenerate."""
        if not rows:
            return []
        by_arm = {arm: sorted(_of(arm, rows), key=lambda row: row["prompt"]) for arm in self._config.all_arms}
        metrics: list[Metric] = []
        for name, column, unit in (
            ("generation_decode_rate", "decode_tokens_per_s", "tokens/s"),
            ("generation_step_p50", "step_p50_ms", "ms"),
            ("generation_step_p90", "step_p90_ms", "ms"),
        ):
            values = {arm: np.array([row[column] for row in chosen]) for arm, chosen in by_arm.items()}
            metrics += self._medians(name, unit, values, length)
        for arm, chosen in by_arm.items():
            kept = [row for row in chosen if not is_degenerate(self._config, row)]
            if kept:
                drafted = [row["steps"] * self._config.num_draft_tokens for row in kept]
                statistic = ratio([row["accepted"] for row in kept], drafted)
                estimate = self._estimate(statistic, len(kept), "fraction")
                about = ("generation_acceptance", arm.name, length, ALL_TEXTS, None, "fraction")
                metrics.append(Metric(*about, estimate))
        return metrics

    def _medians(self, name: str, unit: str, values: Mapping[Arm, Array], length: int) -> list[Metric]:
        """Medians, and medians of the quotients to the baseline's value of the same batch or prompt."""
        base = values[self._base]
        statistics = [(name, arm, unit, values[arm]) for arm in values]
        statistics += [(f"{name}_change", arm, "percent", values[arm] / base - 1) for arm in self._others]
        return [
            Metric(
                title,
                arm.name,
                length,
                ALL_TEXTS,
                None,
                its_unit,
                self._estimate(weighted_median(of_arm), len(base), its_unit),
            )
            for title, arm, its_unit, of_arm in statistics
        ]

    def _estimate(self, statistic: Statistic, clusters: int, unit: str) -> Estimate:
        """Value and interval in the unit: statistics are fractions where it is points or percent."""
        config = self._config
        estimate = bootstrap(
            statistic, clusters, resamples=config.resamples, confidence=config.confidence, seed=config.seed
        )
        return estimate.scaled(100) if unit in ("points", "percent") else estimate

    def _shares(self, counts: Mapping[Arm, _Counts]) -> dict[Arm, Statistic]:
        """Acceptance of every arm."""
        drafts = self._config.num_draft_tokens
        return {arm: ratio(c.accepted, c.rounds * drafts) for arm, c in counts.items()}

    def _counts(self, rows: Sequence[Row], cluster: str = "prompt") -> dict[Arm, _Counts]:
        """What the rows of every cluster, those with one value of the column, count together."""
        positions = np.arange(1, self._config.num_draft_tokens + 1)
        counts = {}
        for arm in self._config.all_arms:
            clusters = _grouped(_of(arm, rows), cluster).values()
            accepted = [np.array([row["accepted"] for row in own]) for own in clusters]
            counts[arm] = _Counts(
                rounds=np.array([len(of_cluster) for of_cluster in accepted]),
                accepted=np.array([of_cluster.sum() for of_cluster in accepted]),
                reached=np.array([(of_cluster[:, None] >= positions).sum(axis=0) for of_cluster in accepted]),
            )
        return counts


def is_degenerate(config: AcceptanceConfig, row: Row) -> bool:
    """Whether a free continuation repeats itself too much for its acceptance to mean anything."""
    return bool(row["repeated_4grams"] > config.max_repeated_4grams)


def checks_summary(checks: Sequence[Row]) -> dict[str, Any]:
    """Per control and arm: prompts, compared items, and how many differ."""
    summary: dict[str, Any] = {}
    for row in checks:
        nothing = {"prompts": 0, "compared": 0, "mismatches": 0}
        of_arm = summary.setdefault(row["check"], {}).setdefault(row["arm"], nothing)
        of_arm["prompts"] += 1
        of_arm["compared"] += row["compared"]
        of_arm["mismatches"] += row["mismatches"]
    return summary


def _of(arm: Arm, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["arm"] == arm.name]


def _grouped(rows: Sequence[Row], column: str) -> dict[Hashable, list[Row]]:
    """Rows by their value of a column, the values ascending, so that groups of all arms are in one order."""
    groups: dict[Hashable, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row[column]):
        groups.setdefault(row[column], []).append(row)
    return groups


def _steps(batch: Sequence[Row]) -> Array:
    """Seconds of each round of a batch, which all its prompts share."""
    return np.array(list({row["round"]: row["round_seconds"] for row in batch}.values()))


def _emitted(batch: Sequence[Row]) -> int:
    """Tokens that the rounds of a batch would have emitted: the accepted ones and one more each."""
    return sum(row["accepted"] + 1 for row in batch)
