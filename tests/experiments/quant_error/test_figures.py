"""The figures: units of the tables, as many lines as can be told apart, footers that say what is shown."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from page4.experiments.quant_error import QuantErrorConfig
from page4.experiments.quant_error.figures import Figures
from page4.experiments.quant_error.summary import UNITS, summarise
from page4.experiments.quant_error.table import markdown_table

ALL_ARMS = ["e4m3-max", "e4m3-mse", "int8"]


def study(num_prompts: int, rules: tuple[str, ...] = ("max", "mse")) -> dict[str, Any]:
    """Its figures by name and its table; every quantity is 0.002, of every arm, everywhere."""
    config = QuantErrorConfig(
        formats=("e4m3", "int8"),
        rules=rules,  # type: ignore[arg-type]
        lengths=(64, 256),
        scored_tokens=32,
        first_bucket=64,
        num_prompts=num_prompts,
        resamples=100,
        dtype="float32",
    )
    rows = {
        layer: [
            {"arm": arm.name, "length": length, "first": window.first, "stop": window.stop, "layer": layer}
            | {"prompt": f"text@{prompt}"}
            | {name: 0.002 for name in UNITS if (name in logits) == (layer in ("target", "draft"))}
            for arm in config.arms
            for length in (64, 256)
            for window in config.windows(length)
            for prompt in range(num_prompts)
        ]
        for logits in [("kl", "flips", "loss", "loss_change")]
        for layer in ("3", "target", "draft")
    }
    metrics = summarise(config, rows["3"], rows["target"] + rows["draft"])
    return Figures(config, metrics).all() | {"table.md": markdown_table(config, metrics)}


def footer(figure: Figure) -> str:
    return figure.get_supxlabel()


def arms(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_small_changes_are_in_the_unit_of_the_tables() -> None:
    shown = study(6)
    for name in ("by_length.png", "by_position.png"):
        axes = next(a for a in shown[name].axes if a.get_title() == "KL divergence, target")
        assert axes.get_ylabel() == "KL (millinats)"
        assert all(line.get_ydata() == pytest.approx(2.0) for line in axes.get_lines())
    change = next(a for a in shown["by_length.png"].axes if a.get_title() == "loss change, draft")
    assert change.get_ylabel() == "change (millinats)"
    assert "| e4m3-max | 256 | 2 [2, 2] |" in shown["table.md"]


def test_lines_are_those_of_the_first_rule_and_the_footer_says_so() -> None:
    shown = study(6)
    for name in ("overlap.png", "by_length.png", "by_position.png"):
        assert arms(shown[name]) == ["e4m3-max", "int8"]
        assert "max clips nothing observed; the other rules are in summary.csv" in footer(shown[name])
    for name in ("kv_error.png", "output_error.png"):
        assert arms(shown[name]) == ALL_ARMS
        assert "; mse has the least squared error" in footer(shown[name])
        assert "other rules" not in footer(shown[name])
    assert all(f"| {arm} | 256 |" in shown["table.md"] for arm in ALL_ARMS)


def test_one_rule_is_not_called_one_of_several() -> None:
    shown = study(6, ("mse",))["by_length.png"]
    assert arms(shown) == ["e4m3-mse", "int8"] and "other rules" not in footer(shown)


def test_too_few_prompts_are_called_that_in_place_of_bars() -> None:
    for num_prompts, bars in ((6, True), (5, False)):
        shown = study(num_prompts)
        said = [shown.pop("table.md").lower(), *map(footer, shown.values())]
        assert len(said) == 6
        for text in said:
            assert ("bootstrap intervals" in text) == bars
            assert ("fewer than 6 prompts: too few for intervals" in text) != bars
