"""Estimates from samples: means over prompts, and paired changes against the reference arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from page4.experiments.quant_error import QuantErrorConfig
from page4.experiments.quant_error.config import Window
from page4.experiments.quant_error.summary import METRIC_COLUMNS, Metrics, reference_arm, summarise
from page4.experiments.samples import to_csv

DIVERGENCES = [0.3, 0.1, 0.8, 0.2, 0.5, 0.4, 0.9, 0.7]
END = Window(32, 64)


def logit_rows(arm: str, divergences: list[float]) -> list[dict[str, Any]]:
    about = {"arm": arm, "length": 64, "first": 32, "stop": 64, "layer": "target", "flips": 0.25}
    return [about | {"prompt": f"text@{i}", "kl": kl} for i, kl in enumerate(divergences)]


def config(**changes: Any) -> QuantErrorConfig:
    return QuantErrorConfig(formats=("fp16", "e4m3", "int8"), rules=("max",), resamples=500, **changes)


def test_changes_are_paired_on_the_prompt() -> None:
    """Prompts differ ninefold, but half of the divergence of every prompt is half for certain."""
    rows = logit_rows("int8", [kl / 2 for kl in DIVERGENCES])[::-1] + logit_rows("e4m3-max", DIVERGENCES)
    metrics = summarise(config(), [], rows)
    mean = metrics.get("kl", "e4m3-max", 64, END, "target")
    assert mean.value == pytest.approx(sum(DIVERGENCES) / 8) and mean.clusters == 8
    assert mean.low < mean.value - 0.1 and mean.value + 0.1 < mean.high
    change = metrics.get("kl_change", "int8", 64, END, "target")
    assert [change.value, change.low, change.high] == pytest.approx([-50, -50, -50])
    flips = metrics.get("flips_change", "int8", 64, END, "target")
    assert flips.value == pytest.approx(0)
    assert metrics.get("kl", "fp16", 64, END, "target").clusters == 0  # not measured


def test_the_reference_is_the_first_8_bit_float() -> None:
    assert reference_arm(config()) == "e4m3-max"
    assert reference_arm(QuantErrorConfig(formats=("int8", "e3m4", "e4m3"), rules=("mse",))) == "e3m4-mse"
    assert reference_arm(QuantErrorConfig(formats=("fp16", "int8"))) is None


def test_records_have_six_digits_and_no_nan() -> None:
    (metric, *_) = summarise(config(), [], logit_rows("e4m3-max", [1 / 3])).all
    assert metric.to_row() == {
        "metric": "kl", "arm": "e4m3-max", "length": 64, "first": 32, "stop": 64, "layer": "target",
        "unit": "nats", "value": 0.333333, "low": None, "high": None, "clusters": 1,
    }  # fmt: skip


def test_metrics_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    rows = logit_rows("e4m3-max", DIVERGENCES) + logit_rows("int8", DIVERGENCES[::-1])
    metrics = summarise(config(), [], rows)
    written = to_csv([metric.to_row() for metric in metrics.all], list(METRIC_COLUMNS))
    (tmp_path / "summary.csv").write_text(written, encoding="utf-8")
    found = Metrics.read(tmp_path / "summary.csv")
    assert to_csv([metric.to_row() for metric in found.all], list(METRIC_COLUMNS)) == written
    assert found.logits == metrics.logits == ["target"]
    flips = found.get("flips", "int8", 64, END, "target")
    assert (flips.value, flips.clusters) == (0.25, 8)
