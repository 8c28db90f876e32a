"""Bootstrap intervals over clusters, for ratios, differences of ratios and medians.

A cluster is a prompt: its rounds share one context and are not independent, so they are drawn together.
Arms of one study see the same prompts, so a difference draws each prompt once, for both arms.

Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 14 (BCa); Hesterberg, What Teachers
Should Know about the Bootstrap, 2015, section 3.3 (widening for few clusters).
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from page4.kernels.errors import InputError

LEAST_CLUSTERS = 6
"""Fewest clusters with an interval. A bootstrap interval cannot leave the range of its data, and the range of
5 values misses their median with probability 2^-4, more than the 5 % that are usually allowed."""

TOO_FEW_PROMPTS = f"fewer than {LEAST_CLUSTERS} prompts: too few for intervals, and to conclude from"
"""What tables and figures say in place of intervals."""

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]
"""Maps cluster weights `[B, N]` (how often each cluster was drawn) to values `[B]`; NaN where undefined."""


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval, whose ends are NaN below `LEAST_CLUSTERS`."""

    value: float
    low: float
    high: float
    clusters: int

    def to_json(self) -> dict[str, float | int | None]:
        """The fields, with null for NaN, which JSON does not have."""
        return {key: None if math.isnan(value) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Estimate:
        """What `to_json` was given, from its fields among others."""
        value, low, high = (math.nan if fields[n] is None else fields[n] for n in ("value", "low", "high"))
        return cls(value, low, high, fields["clusters"])

    def scaled(self, factor: float) -> Estimate:
        """The same estimate in another unit; `factor` is positive."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.clusters)


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Statistic:
    """Sum of `numerator [N]` over sum of `denominator [N]`: acceptance is accepted over drafted tokens."""
    top, bottom = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)

    def statistic(weights: Array) -> Array:
        return _divide(weights @ top, weights @ bottom)

    return statistic


def weighted_median(values: ArrayLike) -> Statistic:
    """Median of `values [N]`, each repeated as often as its weight; the mean of the two middle ones."""
    unordered = np.asarray(values, np.float64)
    order = np.argsort(unordered, kind="stable")
    ordered = unordered[order]

    def statistic(weights: Array) -> Array:
        cumulative = np.cumsum(weights[:, order], axis=1)
        half = cumulative[:, -1:] / 2
        lower = ordered[np.argmax(cumulative >= half, axis=1)]
        upper = ordered[np.argmax(cumulative > half, axis=1)]
        median: Array = (lower + upper) / 2
        return median

    return statistic


def difference(treated: Statistic, control: Statistic) -> Statistic:
    """`treated - control` of the same drawn clusters."""
    return lambda weights: treated(weights) - control(weights)


def relative_difference(treated: Statistic, control: Statistic) -> Statistic:
    """`treated / control - 1` of the same drawn clusters; NaN where the control is 0."""

    def statistic(weights: Array) -> Array:
        return _divide(treated(weights), control(weights)) - 1

    return statistic


def bootstrap(
    statistic: Statistic,
    clusters: int,
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    widen: bool = True,
) -> Estimate:
    """Value of `statistic` and its bias-corrected and accelerated (BCa) bootstrap interval.

    Args:
        statistic: Vectorised over rows of weights, see `Statistic`.
        clusters: N, how many clusters there are.
        resamples: How many times N clusters are drawn with replacement.
        confidence: Coverage asked of the interval, between 0 and 1.
        seed: The draws depend on it and on N alone, so statistics of the same clusters share their draws.
        widen: Replace the normal quantile z(a) by sqrt(N/(N-1)) t_{N-1}(a). The plain interval of 6 clusters
            that is meant to cover 95 % covers 87 %; widened, it covers 94 %.

    Raises:
        InputError: Fewer than 1 cluster, fewer than 100 resamples, or a confidence outside (0, 1).
    """
    if clusters < 1 or resamples < 100 or not 0 < confidence < 1:
        raise InputError(
            "a bootstrap needs at least 1 cluster, 100 resamples and a confidence between 0 and 1, "
            f"got {clusters}, {resamples} and {confidence}"
        )
    value = float(statistic(np.ones((1, clusters)))[0])
    if clusters < LEAST_CLUSTERS or math.isnan(value):
        return Estimate(value, math.nan, math.nan, clusters)
    draws = np.sort(statistic(_weights(clusters, resamples, seed)))
    if np.isnan(draws).any():
        return Estimate(value, math.nan, math.nan, clusters)
    normal = NormalDist()
    quantile = normal.inv_cdf((1 + confidence) / 2)
    if widen:
        quantile = math.sqrt(clusters / (clusters - 1)) * student_quantile(confidence, clusters - 1)
    # Draws equal to the value count half, so that a statistic with few distinct values is not called biased.
    below = (np.searchsorted(draws, value, "left") + np.searchsorted(draws, value, "right")) / (2 * resamples)
    bias = normal.inv_cdf(min(max(below, 1 / (2 * resamples)), 1 - 1 / (2 * resamples)))
    acceleration = _acceleration(statistic, clusters)

    def bound(z: float) -> float:
        shrink = 1 - acceleration * (bias + z)
        # Past its pole the adjustment has no meaning; the outermost draw is the widest answer there is.
        probability = normal.cdf(bias + (bias + z) / shrink) if shrink > 0 else float(z > 0)
        return float(np.quantile(draws, probability))

    return Estimate(value, bound(-quantile), bound(quantile), clusters)


def student_quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| < t) = `confidence` for Student's T with `freedom` >= 1 degrees of freedom.

    Bisects Abramowitz and Stegun, Handbook of Mathematical Functions, formulas 26.7.3 and 26.7.4, in
    theta = atan(t / sqrt(freedom)).
    """
    steps = np.arange(2 + freedom % 2, freedom - 1, 2)

    def probability(theta: float) -> float:
        cosine, sine = math.cos(theta), math.sin(theta)
        series = 1 + float(np.cumprod((steps - 1) / steps * cosine**2).sum())
        if freedom % 2 == 0:
            return sine * series
        return 2 / math.pi * (theta + (sine * cosine * series if freedom > 1 else 0))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _divide(top: Array, bottom: Array) -> Array:
    """Quotient, NaN where `bottom` is 0."""
    quotient: Array = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)
    return quotient


@functools.lru_cache(maxsize=4)  # a study asks for the same draws hundreds of times
def _weights(clusters: int, resamples: int, seed: int) -> Array:
    """`[resamples, clusters]` multinomial counts: drawing clusters with replacement, order forgotten."""
    generator = np.random.default_rng([seed, clusters, zlib.crc32(b"bootstrap")])
    uniform = np.full(clusters, 1 / clusters)
    weights = generator.multinomial(clusters, uniform, size=resamples).astype(np.float64)
    weights.setflags(write=False)
    return weights


def _acceleration(statistic: Statistic, clusters: int) -> float:
    """Skewness of the leave-one-out values over 6; 0 where they are all equal or one is undefined."""
    left_out = statistic(np.ones((clusters, clusters)) - np.eye(clusters))
    deviation = left_out.mean() - left_out
    spread = float((deviation**2).sum())
    if not spread > 0:
        return 0.0
    return float((deviation**3).sum() / (6 * spread**1.5))
