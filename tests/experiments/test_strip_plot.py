"""Figures of points in rows: every point is where its value and its row say, told apart by group."""

from __future__ import annotations

import numpy as np

from page4.experiments.strip_plot import Point, plot_strips

POINTS = [
    Point("scores", "fp16", 80.0),
    Point("scores", "e4m3", 80.0),
    Point("select", "e4m3", 10.0),
    Point("select", "e4m3", 20.0),
]


def test_points_stand_in_their_rows_and_none_hides_another() -> None:
    figure = plot_strips(POINTS, 100, "share (%)", "title", "note")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["scores", "select"]
    assert axes.yaxis_inverted() and axes.get_xlabel() == "share (%)"
    lines = {line.get_label(): line for line in axes.lines}
    drawn = [
        (float(x), round(float(y)), label)
        for label in ("fp16", "e4m3")
        for x, y in zip(*map(np.asarray, lines[label].get_data()), strict=True)
    ]
    assert drawn == [(80, 0, "fp16"), (80, 0, "e4m3"), (10, 1, "e4m3"), (20, 1, "e4m3")]
    assert np.asarray(lines["fp16"].get_ydata())[0] != np.asarray(lines["e4m3"].get_ydata())[0]
    assert lines["fp16"].get_color() != lines["e4m3"].get_color()
    assert lines["fp16"].get_marker() != lines["e4m3"].get_marker()


def test_the_line_is_in_sight_whatever_the_values() -> None:
    (axes,) = plot_strips(POINTS, 100, "share (%)", "title", "note").axes
    low, high = axes.get_xlim()
    assert low == 0 and high > 100
