"""Estimates of the study from its samples alone, so that a summary can be made again from the files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from page4.experiments.quant_error.config import QuantErrorConfig, Window
from page4.experiments.samples import Row, read_samples
from page4.experiments.statistics import Estimate, bootstrap, ratio, relative_difference
from page4.kernels.codecs import BYTE_FLOATS

UNITS = {
    "k_error": "fraction",
    "v_error": "fraction",
    "k_expected": "fraction",
    "v_expected": "fraction",
    "k_clipped": "fraction",
    "v_clipped": "fraction",
    "k_subnormal": "fraction",
    "v_subnormal": "fraction",
    "output_local": "fraction",
    "output_accumulated": "fraction",
    "jaccard": "fraction",
    "kl": "nats",
    "flips": "fraction",
    "loss": "nats",
    "loss_change": "nats",
}
"""Every measured quantity and its unit; see the columns of the samples."""

_WITHOUT_INTERVAL = {name for name in UNITS if name.endswith(("_expected", "_clipped", "_subnormal"))}
"""What describes the stored values rather than an effect."""

_COMPARED = ("output_accumulated", "kl", "flips")
"""What is also compared with the reference arm, as `<name>_change` in percent."""

_GROWING = ("output_accumulated", "kl", "flips")
"""What is also compared with the shortest length, as `<name>_from_shortest` in its own unit."""

METRIC_COLUMNS: dict[str, type] = {
    "metric": str,
    "arm": str,
    "length": int,
    "first": int,
    "stop": int,
    "layer": str,
    "unit": str,
    "value": float,
    "low": float,
    "high": float,
    "clusters": int,
}
"""Of `summary.csv`."""

UNQUANTISED = "unquantised"
"""In the place of an arm, the pass that arms are compared with.

Its `loss` follows from any arm's samples; `loss_from_shorter` is that minus its loss at the next shorter
length, of the same prompts and the same tokens.
"""

_NOT_MEASURED = Estimate(math.nan, math.nan, math.nan, 0)


class Place(NamedTuple):
    """What an estimate is about: arm or `UNQUANTISED`, context length, window in it, layer or logits."""

    arm: str
    length: int
    window: Window
    layer: str


@dataclass(frozen=True)
class Metric:
    """One estimated quantity: a mean over prompts, or a change of one that is paired on the prompt."""

    name: str
    place: Place
    unit: str
    estimate: Estimate

    def to_row(self) -> Row:
        """A flat record for `summary.csv` and `summary.json`."""
        arm, length, window, layer = self.place
        about = {"metric": self.name, "arm": arm, "length": length, "first": window.first}
        about |= {"stop": window.stop, "layer": layer, "unit": self.unit}
        found = {name: _short(value) for name, value in self.estimate.to_json().items()}
        return about | found

    @classmethod
    def from_row(cls, row: Row) -> Metric:
        """The metric of a row of `summary.csv`."""
        place = Place(row["arm"], row["length"], Window(row["first"], row["stop"]), row["layer"])
        return cls(row["metric"], place, row["unit"], Estimate.from_json(row))


class Metrics:
    """The metrics of a study, found by what they are about."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.all = list(metrics)
        self._found = {(metric.name, metric.place): metric.estimate for metric in self.all}

    @classmethod
    def read(cls, file: Path) -> Metrics:
        """The metrics that a study left in its `summary.csv`.

        Raises:
            InputError: Other columns, or a cell that is not of its column's type.
        """
        return cls(map(Metric.from_row, read_samples(file, METRIC_COLUMNS)))

    def get(self, name: str, arm: str, length: int, window: Window, layer: str) -> Estimate:
        """The estimate; all NaN, of no clusters, when the study did not measure it."""
        return self._found.get((name, Place(arm, length, window, layer)), _NOT_MEASURED)

    @property
    def layers(self) -> list[str]:
        """Names of the sparse layers, in the order in which they run."""
        return list(dict.fromkeys(m.place.layer for m in self.all if m.name == "k_error"))

    @property
    def logits(self) -> list[str]:
        """Names of the logits, the target's first."""
        return list(dict.fromkeys(m.place.layer for m in self.all if m.name == "kl"))

    def has(self, name: str) -> bool:
        """Whether there is any estimate of this name: one length has no growth, old studies no loss."""
        return any(m.name == name for m in self.all)


def unquantised_format(config: QuantErrorConfig) -> str:
    """What the pass that arms are compared with stores: the activations' own dtype."""
    return {"float16": "fp16", "float32": "fp32"}[config.dtype or "float32"]


def reference_arm(config: QuantErrorConfig) -> str | None:
    """The first arm of an 8-bit float, with which the others are compared."""
    return next((arm.name for arm in config.arms if arm.kv_format in BYTE_FLOATS), None)


def summarise(config: QuantErrorConfig, layers: Sequence[Row], logits: Sequence[Row]) -> Metrics:
    """All estimates of a finished study.

    Args:
        config: Resolved.
        layers: Rows of `samples.csv`; all arms have the same prompts everywhere.
        logits: Rows of `logits.csv`.
    """
    reference = reference_arm(config)
    metrics: list[Metric] = []
    for rows in (layers, logits):
        values = _by_place(rows)
        for place, columns in values.items():
            for name, of_prompts in columns.items():
                metrics.append(
                    Metric(name, place, UNITS[name], _mean(config, of_prompts, name not in _WITHOUT_INTERVAL))
                )
                if name in _COMPARED and reference is not None and place.arm != reference:
                    of_reference = values[place._replace(arm=reference)][name]
                    change = _change(config, of_prompts, of_reference)
                    metrics.append(Metric(f"{name}_change", place, "percent", change))
        metrics += _unquantised_loss(config, values)
        metrics += _growth(config, values)
    return Metrics(metrics)


def _short(value: float | int | None) -> float | int | None:
    """Six digits, as samples have; no file needs more."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _by_place(rows: Sequence[Row]) -> dict[Place, dict[str, NDArray[np.float64]]]:
    """Values `[prompts]` of every quantity, in the order of the prompts' names, which is that of all arms."""
    grouped: dict[Place, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["prompt"]):
        place = Place(row["arm"], row["length"], Window(row["first"], row["stop"]), row["layer"])
        grouped.setdefault(place, []).append(row)
    return {
        place: {name: np.array([row[name] for row in group]) for name in UNITS if name in group[0]}
        for place, group in grouped.items()
    }


def _unquantised_loss(
    config: QuantErrorConfig, values: Mapping[Place, Mapping[str, NDArray[np.float64]]]
) -> list[Metric]:
    """The unquantised pass's loss everywhere, and what each longer context changes of it."""
    unit = UNITS["loss"]
    losses = {
        place._replace(arm=UNQUANTISED): columns["loss"] - columns["loss_change"]
        for place, columns in values.items()
        if place.arm == config.arms[0].name and "loss" in columns
    }
    metrics = [Metric("loss", place, unit, _mean(config, loss, True)) for place, loss in losses.items()]
    for shorter, longer in itertools.pairwise(config.lengths or ()):
        for place, loss in losses.items():
            if place[1:3] == (longer, config.scored(longer)) and config.scored_alike(shorter):
                before = losses[place._replace(length=shorter, window=config.scored(shorter))]
                change = _mean(config, loss - before, True)
                metrics.append(Metric("loss_from_shorter", place, unit, change))
    return metrics


def _growth(
    config: QuantErrorConfig, values: Mapping[Place, Mapping[str, NDArray[np.float64]]]
) -> list[Metric]:
    """What longer contexts add to the arms' errors at the same tokens: paired, so that prompts may differ."""
    shortest, *longer = config.lengths or (0,)
    if not longer or not config.scored_alike(shortest):
        return []
    metrics = []
    for place, columns in values.items():
        if place.length in longer and place.window == config.scored(place.length):
            before = values[place._replace(length=shortest, window=config.scored(shortest))]
            for name in _GROWING:
                if name in columns:
                    change = _mean(config, columns[name] - before[name], True)
                    metrics.append(Metric(f"{name}_from_shortest", place, UNITS[name], change))
    return metrics


def _mean(config: QuantErrorConfig, values: NDArray[np.float64], with_interval: bool) -> Estimate:
    if not with_interval:
        return Estimate(float(values.mean()), math.nan, math.nan, len(values))
    return bootstrap(
        ratio(values, np.ones_like(values)),
        len(values),
        resamples=config.resamples,
        confidence=config.confidence,
        seed=config.seed,
    )


def _change(config: QuantErrorConfig, treated: NDArray[np.float64], control: NDArray[np.float64]) -> Estimate:
    ones = np.ones_like(treated)
    return bootstrap(
        relative_difference(ratio(treated, ones), ratio(control, ones)),
        len(treated),
        resamples=config.resamples,
        confidence=config.confidence,
        seed=config.seed,
    ).scaled(100)
