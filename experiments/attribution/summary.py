"""Estimates of the study from its samples: every arm against FP16, and treatments against their format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from page4.experiments.acceptance.config import AcceptanceConfig
from page4.experiments.acceptance.metrics import ALL_LENGTHS, ALL_TEXTS, Metric, Metrics
from page4.experiments.acceptance.summary import Estimator
from page4.experiments.attribution.arms import Condition
from page4.experiments.samples import Row
from page4.experiments.statistics import Array, bootstrap, ratio

_Round = tuple[str, int, int]
"""Prompt, length and turn."""

TREATED = ("noise", "choice")
"""Groups whose arms are also compared with the studied format, from which they differ in one thing."""

FREE_LOSS, FREE_BOUND = -1.0, -2.0
"""A format costs nothing if it keeps 99 % of FP16's acceptance, and the interval excludes a loss of 2 %."""

LEAST_ROUNDS = 400
"""Fewest rounds of a length that can tell. Of fewer, often none is changed by a format that changes one in a
hundred, and an interval over nothing but zeros has no width."""


def summarise(measured: AcceptanceConfig, conditions: Sequence[Condition], rows: Sequence[Row]) -> Metrics:
    """Acceptance of every arm and its difference to the baseline, by length and over all.

    Besides: `changed_rounds`, the share of rounds with another number of accepted drafts than the baseline's;
    how much larger it is than with the studied format, `changed_rounds_to_format`, paired on the prompt; and
    `difference_to_format`, the acceptance of arms that differ from the studied format in one thing. They are
    percent and points, with intervals over prompts.

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
        metrics += _changed(measured, studied.name, chosen, length)
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


def _changed(
    measured: AcceptanceConfig, studied: str, rows: Sequence[Row], length: int | str
) -> list[Metric]:
    """In how many rounds an arm accepted another number of drafts than the baseline."""
    accepted = {
        arm.name: {_round(row): row["accepted"] for row in rows if row["arm"] == arm.name}
        for arm in measured.all_arms
    }
    base = accepted[measured.baseline.name]
    prompts = sorted({prompt for prompt, _, _ in base})
    rounds = _count(prompts, base)
    changed = {
        arm: _count(prompts, [key for key, count in base.items() if other[key] != count])
        for arm, other in accepted.items()
    }

    def share(name: str, arm: str, unit: str, count: Array) -> Metric:
        estimate = bootstrap(
            ratio(count, rounds),
            len(prompts),
            resamples=measured.resamples,
            confidence=measured.confidence,
            seed=measured.seed,
        )
        return Metric(name, arm, length, ALL_TEXTS, None, unit, estimate.scaled(100))

    metrics = []
    for arm in measured.all_arms[1:]:
        metrics.append(share("changed_rounds", arm.name, "percent", changed[arm.name]))
        if arm.name != studied:
            more = changed[arm.name] - changed[studied]
            metrics.append(share("changed_rounds_to_format", arm.name, "points", more))
    return metrics


def _count(prompts: Sequence[str], rounds: Iterable[_Round]) -> Array:
    """How many of the rounds each prompt has."""
    index = {prompt: i for i, prompt in enumerate(prompts)}
    return np.bincount([index[prompt] for prompt, _, _ in rounds], minlength=len(prompts)).astype(np.float64)


def _round(row: Row) -> _Round:
    return row["prompt"], row["length"], row["round"]
