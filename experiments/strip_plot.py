"""A figure of single points in rows: how all cases of a kernel lie against one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from page4.experiments.plots import COLOURS, MARKERS


@dataclass(frozen=True)
class Point:
    """A value, the row that it stands in, and the group that gives its colour and marker."""

    row: str
    group: str
    value: float


def plot_strips(points: Sequence[Point], line: float, quantity: str, title: str, note: str) -> Figure:
    """Points by row, in the order of appearance, with a vertical line; `quantity` names them with the unit.

    Groups stand below each other within a row, so that equal values do not hide each other.
    """
    rows = list(dict.fromkeys(point.row for point in points))
    groups = list(dict.fromkeys(point.group for point in points))
    figure = Figure(figsize=(8.0, 0.5 * len(rows) + 1.7), layout="constrained")
    axes = figure.subplots()
    axes.axvline(line, color="black", linewidth=1)
    for index, group in enumerate(groups):
        own = [point for point in points if point.group == group]
        shift = 0.6 * ((index + 0.5) / len(groups) - 0.5)
        axes.plot(
            [point.value for point in own],
            [rows.index(point.row) + shift for point in own],
            linestyle="none", marker=MARKERS[index % len(MARKERS)], markersize=4, alpha=0.8,
            color=COLOURS[index % len(COLOURS)], label=group,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(quantity)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="0.35")
    return figure
