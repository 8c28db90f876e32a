"""Figures: they render, show what was measured where it was measured, and survive missing intervals."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from page4.experiments.plots import (
    ForestGroup,
    Series,
    format_tokens,
    plot_acceptance,
    plot_by_position,
    plot_changes,
    plot_difference,
    plot_forest,
)
from page4.experiments.statistics import Estimate

LENGTHS = (1024, 2048, 4096)


def _series(label: str, level: float, width: float = 0.03, x: tuple[int, ...] = LENGTHS) -> Series:
    return Series(label, x, [Estimate(level, level - width, level + width, 8) for _ in x])


def _render(figure: Figure) -> np.ndarray:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=50)
    buffer.seek(0)
    return matplotlib.image.imread(buffer)


def test_acceptance_figure_shows_every_arm_on_a_log2_axis_with_units() -> None:
    figure = plot_acceptance([_series("fp16", 0.5), _series("e4m3", 0.45)], "title", "note")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fp16", "e4m3"]
    assert axes.get_xscale() == "log"
    assert list(axes.get_xticks()) == list(LENGTHS)
    assert "tokens" in axes.get_xlabel() and "accepted / drafted" in axes.get_ylabel()
    assert _render(figure).std() > 0.01


def test_interval_bars_reach_from_low_to_high() -> None:
    (axes,) = plot_acceptance([_series("fp16", 0.5, width=0.1)], "title", "note").axes
    (bars,) = [item for item in axes.collections if item.get_segments()]  # type: ignore[attr-defined]
    assert bars.get_segments()[0][:, 1] == pytest.approx([0.4, 0.6])  # type: ignore[attr-defined]


def test_difference_figure_has_the_noise_band_and_a_zero_line() -> None:
    noise = Series("A/A", LENGTHS, [Estimate(0.1, -1.25, 1.5, 8) for _ in LENGTHS])
    (axes,) = plot_difference([_series("e4m3 - fp16", -2.0, 1.0)], noise, "title", "note").axes
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (-1.25, 1.5)
    assert any(np.allclose(line.get_ydata(), 0) for line in axes.lines)
    assert "percentage points" in axes.get_ylabel()


def test_a_single_length_still_shows_its_noise_band() -> None:
    noise = _series("A/A", 0.0, 1.0, x=(1024,))
    (axes,) = plot_difference([_series("e4m3", -2.0, 1.0, x=(1024,))], noise, "title", "note").axes
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 0].min() < 1024 < band[:, 0].max()


def test_position_figure_has_a_panel_per_length_and_a_tick_per_draft() -> None:
    panels = [(f"{format_tokens(n)} tokens", [_series("fp16", 0.6, x=(1, 2, 3))]) for n in LENGTHS]
    figure = plot_by_position(panels, "title", "note")
    assert [axes.get_title() for axes in figure.axes] == ["1k tokens", "2k tokens", "4k tokens"]
    assert all(list(axes.get_xticks()) == [1, 2, 3] for axes in figure.axes)
    assert _render(figure).std() > 0.01


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("plot", [plot_acceptance, lambda s, *text: plot_difference(s, None, *text)])
def test_seventeen_arms_look_different_and_leave_room_for_the_axes(plot: Callable[..., Figure]) -> None:
    """Four formats of the target times four of the draft, beside a baseline."""
    series = [_series(f"e4m3:e4m3 {i} (target e4m3, draft e4m3)", 0.5) for i in range(17)]
    figure = plot(series, "title", "note")
    assert _render(figure).std() > 0.01
    (axes,) = figure.axes
    lines = [line for line in axes.lines if line.get_label() in {s.label for s in series}]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 17
    assert axes.get_position().width > 0.5 and axes.get_position().height > 0.5
    positions = [float(np.asarray(line.get_xdata())[0]) for line in lines]
    assert len(set(positions)) == 17
    assert LENGTHS[0] / 1.25 < min(positions) and max(positions) < LENGTHS[0] * 1.25
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [s.label for s in series]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("arms", [2, 4, 5, 17])
def test_long_names_take_no_room_from_the_axes(arms: int) -> None:
    """A legend stands above the axes where it fits into a row there, else beside them in a wider figure."""
    names = [f"arm {i} (target fp16,1:e4m3, draft fp16)" for i in range(arms)]
    short = [_series(name[:5], 0.5) for name in names]
    long = [_series(name, 0.5) for name in names]

    def draw(series: list[Series]) -> list[Figure]:
        by_position = [("1k", [_series(line.label, 0.6, x=(1, 2, 3)) for line in series])]
        return [
            plot_acceptance(series, "title", "note"),
            plot_difference(series[1:], series[0], "title", "note"),
            plot_changes([("prefill", series), ("decode", series)], "title", "note"),
            plot_by_position(by_position, "title", "note"),
        ]

    def inches(figure: Figure) -> list[tuple[float, float]]:
        _render(figure)  # lays it out
        width, height = figure.get_size_inches()
        places = [axes.get_position() for axes in figure.axes]
        return [(place.width * width, place.height * height) for place in places]

    for one, other in zip(draw(short), draw(long), strict=True):
        assert np.asarray(inches(other)) == pytest.approx(np.asarray(inches(one)), abs=0.6)


def test_estimates_without_interval_are_drawn_as_points() -> None:
    lone = Series("fp16", LENGTHS, [Estimate(0.5, math.nan, math.nan, 1) for _ in LENGTHS])
    for figure in (plot_acceptance([lone], "title", "note"), plot_difference([lone], lone, "title", "note")):
        assert _render(figure).std() > 0.01


@pytest.mark.parametrize(("tokens", "text"), [(96, "96"), (1024, "1k"), (1536, "1.5k"), (32768, "32k")])
def test_token_counts_are_short(tokens: int, text: str) -> None:
    assert format_tokens(tokens) == text


def test_forest_figure_has_a_row_per_condition_and_a_bar_per_sample() -> None:
    def lines(*levels: float) -> list[Series]:
        rows = range(len(levels))
        return [
            Series(
                label,
                rows,
                [Estimate(level + shift, level + shift - 1, level + shift + 2, 8) for level in levels],
            )
            for label, shift in (("4k", 0.0), ("16k", 0.5))
        ]

    groups = [
        ForestGroup("first question", ["a", "b"], lines(-1.0, 0.0)),
        ForestGroup("second question", ["c"], lines(3.0)),
    ]
    figure = plot_forest(groups, "effect (points)", "title", "note")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    assert [text.get_text() for text in axes.texts] == ["first question", "second question"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["4k", "16k"]
    assert axes.get_xlabel() == "effect (points)" and axes.yaxis_inverted()
    bars = [bar for item in axes.collections for bar in item.get_segments()]  # type: ignore[attr-defined]
    ends = [(bar[0, 0], bar[1, 0]) for bar in bars]
    assert ends == [(-2, 1), (-1, 2), (-1.5, 1.5), (-0.5, 2.5), (2, 5), (2.5, 5.5)]
    ticks = axes.get_yticks()
    nearest = [min(range(3), key=lambda row: abs(ticks[row] - bar[0, 1])) for bar in bars]
    assert nearest == [0, 1, 0, 1, 2, 2]
    assert _render(figure).std() > 0.01
