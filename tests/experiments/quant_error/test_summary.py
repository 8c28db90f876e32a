"""Estimates from samples: means over prompts, and paired changes against the reference arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from page4.experiments.quant_error import QuantErrorConfig
from page4.experiments.quant_error.config import Window
from page4.experiments.quant_error.figures import Figures
from page4.experiments.quant_error.summary import (
    METRIC_COLUMNS,
    UNQUANTISED,
    Metrics,
    reference_arm,
    summarise,
)
from page4.experiments.quant_error.table import markdown_table
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


def loss_rows(arm: str, length: int, losses: list[float], change: float) -> list[dict[str, Any]]:
    """Of the last 32 tokens: each prompt's unquantised loss, to which the arm adds `change`."""
    about = {"arm": arm, "length": length, "first": length - 32, "stop": length, "flips": 0.25}
    about["loss_change"] = change
    return [
        about | {"layer": name, "prompt": f"text@{i}", "kl": loss / 100, "loss": loss + change}
        for name in ("target", "draft")
        for i, loss in enumerate(losses)
    ]


def output_rows(arm: str, length: int) -> list[dict[str, Any]]:
    """Of the last 32 tokens: prompts differ, and every token of context adds 1e-4 to all of them."""
    about = {"arm": arm, "length": length, "first": length - 32, "stop": length, "layer": "7"}
    return [
        about | {"prompt": f"text@{i}", "output_accumulated": kl + 1e-4 * length}
        for i, kl in enumerate(DIVERGENCES)
    ]


def losing(lengths: tuple[int, ...]) -> tuple[QuantErrorConfig, Metrics]:
    """Prompts differ by several nats; every doubling of the context takes 0.05 from all of them."""
    wanted = config(lengths=lengths, scored_tokens=32, num_prompts=8, dtype="float32")
    rows: list[dict[str, Any]] = []
    for arm, change in (("fp16", 0.0), ("e4m3-max", 0.002), ("int8", -0.001)):
        for length in lengths:
            losses = [2 + 3 * kl - 0.05 * np.log2(length) for kl in DIVERGENCES]
            rows += loss_rows(arm, length, losses, change)
    outputs = [row for arm in ("e4m3-max", "int8") for length in lengths for row in output_rows(arm, length)]
    return wanted, summarise(wanted, outputs, rows)


def test_the_unquantised_loss_and_what_context_takes_from_it() -> None:
    wanted, metrics = losing((64, 256))
    for length in (64, 256):
        place = (length, wanted.scored(length), "draft")
        loss = metrics.get("loss", UNQUANTISED, *place)
        assert loss.value == pytest.approx(2 + 3 * np.mean(DIVERGENCES) - 0.05 * np.log2(length))
        assert loss.high - loss.low > 0.5  # prompts differ
        change = metrics.get("loss_change", "e4m3-max", *place)
        assert [change.value, change.low, change.high] == pytest.approx([0.002] * 3)
        assert metrics.get("loss", "e4m3-max", *place).value == pytest.approx(loss.value + 0.002)
    fall = metrics.get("loss_from_shorter", UNQUANTISED, 256, wanted.scored(256), "draft")
    assert [fall.value, fall.low, fall.high] == pytest.approx([-0.1] * 3)
    first = metrics.get("loss_from_shorter", UNQUANTISED, 64, wanted.scored(64), "draft")
    assert first.clusters == 0  # there is no shorter one
    assert metrics.logits == ["target", "draft"]


def test_growth_is_against_the_shortest_length_and_paired_on_the_prompt() -> None:
    """Divergences are a hundredth of the losses: prompts differ by far more than context changes."""
    wanted, metrics = losing((64, 128, 256))
    for length, doublings in ((128, 1), (256, 2)):
        place = ("e4m3-max", length, wanted.scored(length))
        mean = metrics.get("kl", *place, "draft")
        assert mean.high - mean.low > 0.005
        kl = metrics.get("kl_from_shortest", *place, "draft")
        assert [kl.value, kl.low, kl.high] == pytest.approx([-0.0005 * doublings] * 3)
        flips = metrics.get("flips_from_shortest", *place, "target")
        assert [flips.value, flips.clusters] == [0, 8]
        output = metrics.get("output_accumulated_from_shortest", *place, "7")
        assert [output.value, output.low, output.high] == pytest.approx([1e-4 * (length - 64)] * 3)
    assert metrics.get("kl_from_shortest", "e4m3-max", 64, wanted.scored(64), "draft").clusters == 0
    shown = markdown_table(wanted, metrics)
    assert "**Growth with context, 256 against the shortest, 64, last 32 tokens of both**" in shown
    assert "| e4m3-max | -1 [-1, -1] | +0 [+0, +0] | -1 [-1, -1] | +0 [+0, +0] |" in shown


def test_one_length_has_no_growth() -> None:
    wanted, metrics = losing((64,))
    assert not metrics.has("kl_from_shortest")
    assert "Growth" not in markdown_table(wanted, metrics)


def test_context_is_not_compared_where_it_changes_what_is_asked() -> None:
    """A nonce has 23 characters, so the last 32 of 48 tokens may begin in it."""
    wanted, metrics = losing((48, 64, 128))
    assert metrics.get("loss_from_shorter", UNQUANTISED, 64, wanted.scored(64), "target").clusters == 0
    assert not metrics.has("kl_from_shortest")  # the shortest is not asked for the same tokens
    assert metrics.get("loss_from_shorter", UNQUANTISED, 128, wanted.scored(128), "target").clusters == 8


def test_the_loss_is_shown_where_it_was_measured() -> None:
    wanted, measured = losing((64, 256))
    older = Metrics(metric for metric in measured.all if "loss" not in metric.name)
    tables = {metrics: markdown_table(wanted, metrics) for metrics in (measured, older)}
    assert "| 256 | 3.0625 [" in tables[measured] and "| -100 [-100, -100] |" in tables[measured]
    assert "draft loss change, millinats" in tables[measured] and "+2 [+2, +2]" in tables[measured]
    assert "loss" not in tables[older]
    panels = [len(Figures(wanted, metrics)._by_length().axes) for metrics in (measured, older)]
    assert panels == [8, 4]
