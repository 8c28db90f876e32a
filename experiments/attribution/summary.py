"""Estimates of the study from its samples: every arm against FP16, and treatments against their format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from page4.experiments.acceptance.config import AcceptanceConfig
from page4.experiments.acceptance.metrics import ALL_LENGTHS, ALL_TEXTS, Metric, Metrics
from page4.experiments.acceptance.summary import Estimator
from page4.experiments.attribution.arms import Condition
from page4.experiments.samples import Row
from page4.experiments.statistics import Estimate, bootstrap, ratio

TREATED = ("noise", "choice")
"""Groups whose arms are also compared with the studied format, from which they differ in one thing."""

FREE_LOSS, FREE_BOUND = -1.0, -2.0
"""A format costs nothing if it keeps 99 % of FP16's acceptance, and the interval excludes a loss of 2 %."""

LEAST_ROUNDS = 400
"""Fewest rounds of a length that can tell. Of fewer, often none is changed by a format that changes one in a
hundred, and an interval over nothing but zeros has no width."""


def summarise(measured: AcceptanceConfig, conditions: Sequence[Condition], rows: Sequence[Row]) -> Metrics:
    """Acceptance of every arm and its difference to the baseline, by length and over all.

    Besides: `changed_rounds`, the share of rounds with another number of accepted drafts than the baseline's,
    and `difference_to_format` of arms that differ from the studied format in one thing. Both are percent and
    points, with intervals over prompts.

    Args:
        measured: How rounds were measured; its arms are those of the conditions.
    """
    estimator = Estimator(measured)
    studied = conditions[2].arm
    contrasted = [c.arm for c in conditions if c.group in TREATED]
    contrasts = Estimator(dataclasses.replace(measured, arms=(studied, *contrasted)))
    metrics: list[Metric] = []
    lengths: list[int | str] = [*(measured.lengths or ()), ALL_LENGTHS]
    for length in lengths:
        chosen = [row for row in rows if length in (row["length"], ALL_LENGTHS)]
        metrics += estimator.acceptance(chosen, length, ALL_TEXTS)
        metrics += _changed(measured, chosen, length)
        if contrasted:
            metrics += [
                dataclasses.replace(metric, name="difference_to_format")
                for metric in contrasts.acceptance(chosen, length, ALL_TEXTS)
                if metric.name == "acceptance_difference"
            ]
    return Metrics(metrics)


def costs_nothing(measured: AcceptanceConfig, metrics: Metrics, arm: str) -> bool | None:
    """Whether an arm's loss is within the bounds at every length; None if there is too little to tell."""
    assert measured.rounds_per_prompt is not None
    changes = [metrics.get("acceptance_change", arm, length) for length in measured.lengths or ()]
    rounds = [change.clusters * measured.rounds_per_prompt for change in changes]
    if min(rounds) < LEAST_ROUNDS or any(np.isnan(change.low) for change in changes):
        return None
    return all(change.value >= FREE_LOSS and change.low > FREE_BOUND for change in changes)


def _changed(measured: AcceptanceConfig, rows: Sequence[Row], length: int | str) -> list[Metric]:
    """Share of the rounds in which an arm accepted another number of drafts than the baseline."""
    accepted = {
        arm.name: {_round(row): row["accepted"] for row in rows if row["arm"] == arm.name}
        for arm in measured.all_arms
    }
    base = accepted[measured.baseline.name]
    return [
        Metric(
            "changed_rounds",
            arm.name,
            length,
            ALL_TEXTS,
            None,
            "percent",
            _share(measured, base, accepted[arm.name]),
        )
        for arm in measured.all_arms[1:]
    ]


def _share(
    measured: AcceptanceConfig,
    base: Mapping[tuple[str, int, int], int],
    other: Mapping[tuple[str, int, int], int],
) -> Estimate:
    prompts = sorted({prompt for prompt, _, _ in base})
    index = {prompt: i for i, prompt in enumerate(prompts)}
    rounds, changed = np.zeros(len(prompts)), np.zeros(len(prompts))
    for key, count in base.items():
        rounds[index[key[0]]] += 1
        changed[index[key[0]]] += other[key] != count
    return bootstrap(
        ratio(changed, rounds),
        len(prompts),
        resamples=measured.resamples,
        confidence=measured.confidence,
        seed=measured.seed,
    ).scaled(100)


def _round(row: Row) -> tuple[str, int, int]:
    return row["prompt"], row["length"], row["round"]
