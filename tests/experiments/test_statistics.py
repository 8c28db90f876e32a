"""Bootstrap intervals: against SciPy, against known coverage, and on the degenerate cases a study meets."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.stats

from page4.experiments.statistics import (
    Estimate,
    bootstrap,
    difference,
    ratio,
    relative_difference,
    student_quantile,
    weighted_median,
)
from page4.kernels.errors import InputError


def _prompts(generator: np.random.Generator, prompts: int, rounds: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Accepted and drafted tokens of prompts whose own acceptance is spread around one half."""
    drafted = np.full(prompts, 3 * rounds)
    return generator.binomial(drafted, generator.beta(6, 6, size=prompts)), drafted


def test_value_is_the_ratio_of_sums_not_the_mean_of_ratios() -> None:
    assert bootstrap(ratio([1, 30], [10, 40]), 2).value == pytest.approx(31 / 50)


def test_interval_equals_scipy_bca_on_the_same_data() -> None:
    accepted, drafted = _prompts(np.random.default_rng(1), 40)
    ours = bootstrap(ratio(accepted, drafted), 40, resamples=40_000, widen=False)
    theirs = scipy.stats.bootstrap(
        (accepted, drafted),
        lambda a, d, axis: a.sum(axis) / d.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=40_000,
        method="BCa",
        rng=np.random.default_rng(2),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.03 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.03 * width)


def test_paired_difference_interval_equals_scipy_on_the_differences() -> None:
    generator = np.random.default_rng(3)
    control, drafted = _prompts(generator, 30)
    treated = control - generator.integers(0, 6, size=30)
    ours = bootstrap(
        difference(ratio(treated, drafted), ratio(control, drafted)), 30, resamples=40_000, widen=False
    )
    theirs = scipy.stats.bootstrap(
        ((treated - control) / drafted,),
        np.mean,
        n_resamples=40_000,
        method="BCa",
        rng=np.random.default_rng(4),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.value == pytest.approx(np.mean((treated - control) / drafted))
    assert ours.low == pytest.approx(theirs.low, abs=0.03 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.03 * width)


@pytest.mark.parametrize("prompts", [6, 40])
def test_coverage_of_a_95_percent_interval_is_near_95_percent(prompts: int) -> None:
    generator = np.random.default_rng(5)
    hits = 0
    for trial in range(400):
        accepted, drafted = _prompts(generator, prompts)
        estimate = bootstrap(ratio(accepted, drafted), prompts, resamples=1000, seed=trial)
        hits += estimate.low <= 0.5 <= estimate.high
    assert 0.91 <= hits / 400 <= 0.985  # 0.95 +- 3.3 standard errors; the unwidened interval of 6 fails this


def test_pairing_makes_the_interval_narrow_when_prompts_differ_and_arms_do_not() -> None:
    generator = np.random.default_rng(6)
    control, drafted = _prompts(generator, 40)
    treated = np.maximum(control - 1, 0)
    paired = bootstrap(difference(ratio(treated, drafted), ratio(control, drafted)), 40)
    single = bootstrap(ratio(control, drafted), 40)
    assert (paired.high - paired.low) < (single.high - single.low) / 10


def test_equal_arms_differ_by_exactly_zero() -> None:
    accepted, drafted = _prompts(np.random.default_rng(7), 12)
    arm = ratio(accepted, drafted)
    for estimate in (bootstrap(difference(arm, arm), 12), bootstrap(relative_difference(arm, arm), 12)):
        assert (estimate.value, estimate.low, estimate.high) == (0, 0, 0)


def test_relative_difference_is_the_quotient_less_one() -> None:
    treated, control = ratio([4, 5, 6], [10, 10, 10]), ratio([5, 5, 10], [10, 10, 10])
    assert bootstrap(relative_difference(treated, control), 3).value == pytest.approx(15 / 20 - 1)


@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0], [4.0, 1.0, 3.0, 2.0], [5.0]])
def test_weighted_median_with_unit_weights_is_the_median(values: list[float]) -> None:
    assert weighted_median(values)(np.ones((1, len(values))))[0] == np.median(values)


def test_weighted_median_repeats_values() -> None:
    values, counts = np.array([7.0, 1.0, 4.0, 9.0]), np.array([[2, 0, 1, 1], [0, 3, 1, 0], [1, 1, 1, 1]])
    expected = [np.median(np.repeat(values, row)) for row in counts]
    assert weighted_median(values)(counts.astype(float)).tolist() == expected


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 7, 30, 255, 2000])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_student_quantile_equals_scipy(freedom: int, confidence: float) -> None:
    expected = scipy.stats.t.ppf((1 + confidence) / 2, freedom)
    assert student_quantile(confidence, freedom) == pytest.approx(expected, rel=1e-9)


def test_seed_decides_the_interval() -> None:
    statistic = ratio(*_prompts(np.random.default_rng(8), 20))
    assert bootstrap(statistic, 20, seed=1) == bootstrap(statistic, 20, seed=1)
    assert bootstrap(statistic, 20, seed=1) != bootstrap(statistic, 20, seed=2)


@pytest.mark.parametrize("prompts", [1, 5])
def test_few_prompts_have_a_value_but_no_interval(prompts: int) -> None:
    estimate = bootstrap(ratio([6] * prompts, [9] * prompts), prompts)
    assert estimate.value == pytest.approx(2 / 3)
    assert math.isnan(estimate.low) and math.isnan(estimate.high)
    assert json.loads(json.dumps(estimate.to_json(), allow_nan=False))["low"] is None


def test_six_prompts_give_an_interval_inside_the_data() -> None:
    estimate = bootstrap(ratio([2, 7, 4, 5, 3, 6], [10] * 6), 6)
    assert 0.2 <= estimate.low < estimate.value < estimate.high <= 0.7


def test_undefined_ratios_give_no_interval_instead_of_a_wrong_one() -> None:
    seldom, always = ratio([0, 0, 0, 0, 0, 1], [9] * 6), ratio([9] * 6, [9] * 6)
    estimate = bootstrap(relative_difference(always, seldom), 6)
    assert estimate.value == pytest.approx(53)
    assert math.isnan(estimate.low) and math.isnan(estimate.high)


@pytest.mark.parametrize("prompts", [3, 8])
def test_an_estimate_is_read_back_from_its_record(prompts: int) -> None:
    found = bootstrap(ratio(np.arange(1, prompts + 1), np.ones(prompts)), prompts, resamples=200)
    again = Estimate.from_json(found.to_json() | {"metric": "acceptance"})
    assert again.to_json() == found.to_json() and math.isnan(again.low) == (prompts < 6)


def test_scaled_changes_the_unit_of_all_three_numbers() -> None:
    assert Estimate(0.5, 0.25, 0.75, 4).scaled(100) == Estimate(50, 25, 75, 4)


@pytest.mark.parametrize(
    ("clusters", "options"),
    [(0, {}), (3, {"resamples": 10}), (3, {"confidence": 1.0}), (3, {"confidence": 0.0})],
)
def test_impossible_requests_are_input_errors(clusters: int, options: dict[str, float]) -> None:
    with pytest.raises(InputError, match="a bootstrap needs"):
        bootstrap(ratio(np.ones(clusters), np.ones(clusters)), clusters, **options)  # type: ignore[arg-type]
