"""Figures of the study: a colour per format, a marker and a line style per scale rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
)

from page4.experiments.plots import COLOURS, format_tokens
from page4.experiments.quant_error.config import Arm
from page4.experiments.quant_error.summary import UNQUANTISED
from page4.experiments.statistics import Estimate
from page4.kvcache import FORMAT_NAMES

_STYLES = {None: ("o", "-"), "max": ("o", "-"), "percentile": ("s", "--"), "mse": ("^", ":")}


@dataclass(frozen=True)
class Line:
    """Estimates of one arm, one for each x, and what theory expects at each (None: it says nothing).

    An arm of None is the unquantised pass.
    """

    arm: Arm | None
    estimates: Sequence[Estimate]
    expected: Sequence[float] | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title, xlabel, ylabel: What stands around it.
        ticks: Label of each x; a number is tokens, on a logarithmic axis.
        lines: One per arm, or that of the unquantised pass.
        percent: The values are fractions, shown as percentages.
        logarithmic: Of the y axis; values of 0 are not on it.
        levels: (arm's format, y) of horizontal lines.
        zero: Whether there is a line at 0, which changes are read against.
    """

    title: str
    xlabel: str
    ylabel: str
    ticks: Sequence[str | int]
    lines: Sequence[Line]
    percent: bool = False
    logarithmic: bool = True
    levels: Sequence[tuple[str, float]] = ()
    zero: bool = False


def colour_of(kv_format: str) -> str:
    """The same in every figure."""
    return COLOURS[FORMAT_NAMES.index(kv_format) % len(COLOURS)]


def plot_panels(
    panels: Sequence[Panel], columns: int, title: str, note: str, one_scale: bool = False
) -> Figure:
    """Panels in rows of `columns`, with one legend for all; bars are intervals.

    With `one_scale` all panels have the same y axis.
    """
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns + 1.8, 3.1 * rows + 1.0), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=one_scale).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="0.35")
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    if panel.logarithmic:
        axes.set_yscale("log")
    for kv_format, level in panel.levels:
        axes.axhline(level, color=colour_of(kv_format), linewidth=0.8, linestyle=(0, (6, 3)), alpha=0.7)
    if panel.zero:
        axes.axhline(0, color="black", linewidth=0.8)
    numeric = all(isinstance(tick, int) for tick in panel.ticks)
    places = [math.log2(tick) if isinstance(tick, int) else x for x, tick in enumerate(panel.ticks)]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    width = (0.4 if numeric else 0.8) * min(gaps, default=1.0)
    for index, line in enumerate(panel.lines):
        shift = width * ((index + 0.5) / len(panel.lines) - 0.5)
        _line(axes, line, [place + shift for place in places], joined=numeric, panel=panel)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    names = [format_tokens(tick) if isinstance(tick, int) else tick for tick in panel.ticks]
    axes.set_xticks(places, names)
    axes.set_xlim(places[0] - 0.7 * width, places[-1] + 0.7 * width)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    if panel.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
    elif panel.logarithmic:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    if panel.logarithmic:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.percent:
        axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _line(axes: Axes, line: Line, x: Sequence[float], joined: bool, panel: Panel) -> None:
    def shown(y: float) -> float:
        return math.nan if panel.logarithmic and y <= 0 else y

    rule, colour, label = None, "0.45", UNQUANTISED
    if line.arm is not None:
        rule, colour, label = line.arm.rule, colour_of(line.arm.kv_format), line.arm.name
    marker, style = _STYLES[rule]
    axes.plot(
        x, [shown(e.value) for e in line.estimates], color=colour, marker=marker, markersize=4.5,
        linewidth=1.2, linestyle=style if joined else "none", label=label, clip_on=False,
    )  # fmt: skip
    low, high = [shown(e.low) for e in line.estimates], [shown(e.high) for e in line.estimates]
    axes.vlines(x, low, high, color=colour, linewidth=1.2)
    if line.expected is not None:
        expected = [shown(y) for y in line.expected]
        axes.plot(x, expected, color="black", marker="_", markersize=7, linestyle="none")
