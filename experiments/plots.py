"""Figures of studies, drawn from estimates with intervals; no figure knows how its numbers were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from page4.experiments.statistics import Estimate

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart with every common kind of colour blindness."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_LEGEND_COLUMNS, _LEGEND_WIDTH = 4, 6.3  # wider legends (inches) stand beside the axes
_LEGEND_SIZE = 9  # points


@dataclass(frozen=True)
class Series:
    """One line of a figure: an estimate at each x, a context length in tokens or a draft position."""

    label: str
    x: Sequence[int]
    estimates: Sequence[Estimate]


@dataclass(frozen=True)
class ForestGroup:
    """Conditions that answer one question: a label each, and lines over their indices, one per sample."""

    heading: str
    labels: Sequence[str]
    series: Sequence[Series]


def plot_acceptance(series: Sequence[Series], title: str, note: str) -> Figure:
    """Acceptance against context length, a line with interval bars per arm; estimates are fractions."""
    figure, axes = _figure(title, note, _labels(series))
    for index, line in enumerate(series):
        _line(axes, line, index, shift=2 ** _offset(index, len(series), 0.06))
    _length_axis(axes, series)
    axes.set_ylabel("acceptance (accepted / drafted tokens)")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(figure, axes)
    return figure


def plot_step_times(series: Sequence[Series], title: str, note: str) -> Figure:
    """Step times in milliseconds against context length, a line per arm."""
    figure, axes = _figure(title, note, _labels(series))
    for index, line in enumerate(series):
        _line(axes, line, index)
    _length_axis(axes, series)
    axes.set_ylabel("step time (ms)")
    _legend(figure, axes)
    return figure


def plot_difference(series: Sequence[Series], noise: Series | None, title: str, note: str) -> Figure:
    """Paired differences of acceptance against context length; estimates are percentage points.

    `noise` is the difference of a control arm that differs in nothing that matters. Its interval is drawn as
    a band: a difference inside it is not told from noise.
    """
    lines = [*series, noise] if noise else series
    figure, axes = _figure(title, note, _labels(lines))
    axes.axhline(0, color="black", linewidth=0.8)
    if noise is not None:
        _band(axes, noise)
    for index, line in enumerate(series):
        _line(axes, line, index + 1, shift=2 ** _offset(index, len(series), 0.06))
    _length_axis(axes, lines)
    axes.set_ylabel("difference of acceptance (percentage points)")
    _legend(figure, axes)
    return figure


def plot_changes(panels: Sequence[tuple[str, Sequence[Series]]], title: str, note: str) -> Figure:
    """Changes in percent against context length with interval bars: a panel per quantity, a line per arm."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    labels = _labels(panels[0][1])
    size = (3.3 * columns + _beside(labels), max(2.7 * rows + 1.0, _least_height(labels)))
    figure = Figure(figsize=size, layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    for axes, (heading, series) in zip(cells, panels, strict=False):
        _clean(axes)
        axes.axhline(0, color="black", linewidth=0.8)
        for index, line in enumerate(series):
            _line(axes, line, index + 1, shift=2 ** _offset(index, len(series), 0.12))
        _length_axis(axes, series)
        axes.set_title(heading, fontsize=10)
        axes.set_ylabel("change (%)")
    _legend_beside(figure, cells[0])
    _titles(figure, title, note)
    return figure


def plot_by_position(panels: Sequence[tuple[str, Sequence[Series]]], title: str, note: str) -> Figure:
    """Share of rounds whose first j drafts were all accepted, for j = 1..K: one panel per context length.

    `panels` holds at least one (heading, lines over the draft positions); estimates are fractions.
    """
    labels = _labels(panels[0][1])
    size = (1.7 * len(panels) + 0.9 + _beside(labels), max(3.6, _least_height(labels)))
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (heading, series) in zip(all_axes, panels, strict=True):
        _clean(axes)
        for index, line in enumerate(series):
            _line(axes, line, index, step=_offset(index, len(series), 0.12))
        positions = sorted({x for line in series for x in line.x})
        axes.set_title(heading, fontsize=10)
        axes.xaxis.set_major_locator(FixedLocator(positions))
        axes.set_xlim(positions[0] - 0.5, positions[-1] + 0.5)
        axes.set_xlabel("draft position")
    all_axes[0].set_ylim(bottom=0)
    all_axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    all_axes[0].set_ylabel("rounds accepted to this position")
    _legend_beside(figure, all_axes[0])
    _titles(figure, title, note)
    return figure


def plot_forest(groups: Sequence[ForestGroup], quantity: str, title: str, note: str) -> Figure:
    """Effects with their intervals, a row per condition, group below group; all groups have the same samples.

    `quantity` names the effect with its unit.
    """
    rows = sum(len(group.labels) + 1.4 for group in groups)
    figure = Figure(figsize=(9.0, 0.27 * rows + 1.4), layout="constrained")
    axes = figure.subplots()
    _clean(axes)
    axes.axvline(0, color="black", linewidth=0.8)
    places: list[float] = []
    labels: list[str] = []
    row = 0.0
    for group in groups:
        axes.text(0.0, row, group.heading, transform=axes.get_yaxis_transform(), fontsize=9, weight="bold")
        row += 1
        for index, line in enumerate(group.series):
            y = [row + x + _offset(index, len(group.series), 0.28) for x in line.x]
            colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
            label = line.label if group is groups[0] else None
            values = [estimate.value for estimate in line.estimates]
            axes.plot(values, y, color=colour, marker=marker, markersize=4.5, linestyle="", label=label)
            low, high = [e.low for e in line.estimates], [e.high for e in line.estimates]
            axes.hlines(y, low, high, color=colour, linewidth=1.4)
        places += [row + x for x in range(len(group.labels))]
        labels += group.labels
        row += len(group.labels) + 0.4
    axes.set_yticks(places, labels, fontsize=9)
    axes.set_ylim(row - 0.4, -0.8)
    axes.set_xlabel(quantity)
    _legend(figure, axes)
    _titles(figure, title, note)
    return figure


def format_tokens(length: int) -> str:
    """1024 -> 1k, 1536 -> 1.5k, 96 -> 96."""
    return f"{length / 1024:.3g}k" if length >= 1024 else str(length)


def _figure(title: str, note: str, labels: Sequence[str]) -> tuple[Figure, Axes]:
    width = 7.2 if _fits_above(labels) else 7.2 + _beside(labels)
    figure = Figure(figsize=(width, max(4.4, _least_height(labels))), layout="constrained")
    axes = figure.subplots()
    _clean(axes)
    _titles(figure, title, note)
    return figure, axes


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _titles(figure: Figure, title: str, note: str) -> None:
    """A title above, and below the axes in small print what the sample is and what the bars mean."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="0.35")


def _labels(series: Sequence[Series]) -> list[str]:
    return [line.label for line in series]


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend in one row between title and axes, where no line runs; beside the axes if it is longer."""
    labels = axes.get_legend_handles_labels()[1]
    if _fits_above(labels):
        axes.legend(
            frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(labels), borderaxespad=0.2,
            fontsize=_LEGEND_SIZE,
        )  # fmt: skip
    else:
        _legend_beside(figure, axes)


def _legend_beside(figure: Figure, axes: Axes) -> None:
    """A legend at the right, for which the figure has to be wider by `_beside`."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=_LEGEND_SIZE)


def _fits_above(labels: Sequence[str]) -> bool:
    return len(labels) <= _LEGEND_COLUMNS and sum(map(_entry_width, labels)) <= _LEGEND_WIDTH


def _beside(labels: Sequence[str]) -> float:
    """Inches that a legend beside the axes takes."""
    return max(map(_entry_width, labels), default=0.0) + 0.2


def _least_height(labels: Sequence[str]) -> float:
    """Inches, with title and note, of a figure beside whose axes these stand."""
    return 0.2 * len(labels) + 1.0


def _entry_width(label: str) -> float:
    """Inches of one entry: line, gaps and text."""
    text = TextPath((0, 0), label, size=_LEGEND_SIZE).get_extents().width if label.strip() else 0.0
    return 0.6 + float(text) / 72


def _offset(index: int, count: int, step: float) -> float:
    """Places lines side by side around their x, so that interval bars do not hide each other.

    Many stand closer together, within five steps, so that they stay nearer to their own x than to the next.
    """
    return (index - (count - 1) / 2) * min(step, 5 * step / count)


def _line(axes: Axes, line: Series, index: int, *, shift: float = 1.0, step: float = 0.0) -> None:
    """Points at `x * shift + step`, joined, with a bar from low to high where there is an interval."""
    x = [value * shift + step for value in line.x]
    values = [estimate.value for estimate in line.estimates]
    # Where colours come again, markers are shifted against them: 49 lines look different.
    colour = COLOURS[index % len(COLOURS)]
    marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
    axes.plot(x, values, color=colour, marker=marker, markersize=5, linewidth=1.4, label=line.label)
    low, high = [e.low for e in line.estimates], [e.high for e in line.estimates]
    axes.vlines(x, low, high, color=colour, linewidth=1.4)


def _band(axes: Axes, noise: Series) -> None:
    """The interval as an area that reaches past the outer lengths, so that a single length shows too."""
    x = [noise.x[0] / 1.1, *noise.x, noise.x[-1] * 1.1]
    estimates = [noise.estimates[0], *noise.estimates, noise.estimates[-1]]
    low, high = [e.low for e in estimates], [e.high for e in estimates]
    axes.fill_between(x, low, high, color="0.6", alpha=0.3, linewidth=0, label=noise.label)
    axes.plot(x, [e.value for e in estimates], color="0.45", linestyle="--", linewidth=1)


def _length_axis(axes: Axes, series: Sequence[Series]) -> None:
    """A logarithmic axis with a tick at every measured length and no other."""
    lengths = sorted({x for line in series for x in line.x})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_tokens(round(x))))
    axes.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
    axes.set_xlabel("context length (tokens)")
