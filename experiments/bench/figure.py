"""The roofline of a bench: time against bytes, with the measured ceilings of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from page4.experiments.bench.config import IMPLEMENTATIONS
from page4.experiments.plots import COLOURS, MARKERS
from page4.experiments.samples import Row
from page4.experiments.strip_plot import Point, plot_strips

_COLUMNS = 3
_ORDER: tuple[str, ...] = IMPLEMENTATIONS


def plot_roofline(rows: Sequence[Row], title: str) -> Figure:
    """Median time of a launch (us) against the bytes that it cannot avoid (MB), a panel per kernel.

    Both axes are logarithmic; bars reach from the 10th to the 90th percentile. The solid line is
    what those bytes take at the measured copy bandwidth, the dashed one a kernel that does nothing. `rows`
    are rows of `bench.csv`; those without a time are left out, and there must be one with.
    """
    timed = [row for row in rows if row["median_us"] is not None]
    kernels = list(dict.fromkeys(row["kernel"] for row in timed))
    columns = min(_COLUMNS, len(kernels))
    lines = -(-len(kernels) // columns)
    figure = Figure(figsize=(3.9 * columns, 3.5 * lines + 0.6), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    colours: dict[str, str] = {}
    for axes, kernel in zip(panels, kernels, strict=False):
        _panel(axes, kernel, [row for row in timed if row["kernel"] == kernel], colours)
    for axes in panels[len(kernels) :]:
        axes.remove()
    handles = {
        label: handle
        for axes in panels[: len(kernels)]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def plot_shares(rows: Sequence[Row]) -> Figure:
    """Share of the copy bandwidth (percent) that the model gets, a row per kernel and a point per shape.

    It is the time of the bytes that cannot be avoided over the median time of a launch. `rows` are as those
    of `plot_roofline`; of every shape the implementation counts that the model gets.
    """
    points = [
        Point(row["kernel"], row["kv_format"] or "any", 100 * row["floor_fraction"])
        for row in rows
        if row["median_us"] is not None and row["chosen"]
    ]
    return plot_strips(
        points,
        100,
        "share of the measured copy bandwidth (%)",
        "What launches reach of the copy bandwidth",
        "a point per shape; small shapes are bound by latency, warm caches may exceed 100 %",
    )


def _panel(axes: Axes, kernel: str, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """A marker tells the implementation, a colour the format; formats keep their colour in all panels."""
    series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        series.setdefault((row["implementation"], row["kv_format"]), []).append(row)
    for (implementation, kv_format), members in series.items():
        colour = colours.setdefault(kv_format, COLOURS[len(colours) % len(COLOURS)])
        axes.errorbar(
            [row["floor_bytes"] / 1e6 for row in members],
            [row["median_us"] for row in members],
            yerr=[
                [max(0.0, row["median_us"] - row["p10_us"]) for row in members],
                [max(0.0, row["p90_us"] - row["median_us"]) for row in members],
            ],
            linestyle="none", marker=MARKERS[_ORDER.index(implementation)], markersize=4,
            color=colour, linewidth=1, label=f"{implementation} {kv_format}".strip(),
        )  # fmt: skip
    bandwidth = max(row["copy_bandwidth"] for row in rows)
    launch = min(row["launch_us"] for row in rows)
    x = np.array(sorted(row["floor_bytes"] for row in rows), dtype=float)
    ends = np.geomspace(x[0] / 1.5, x[-1] * 1.5, 50)
    label = f"copy bandwidth, measured: {bandwidth / 1e12:.2f} TB/s"
    if bandwidth < 1e12:
        label = f"copy bandwidth, measured: {bandwidth / 1e9:.1f} GB/s"
    axes.plot(ends / 1e6, 1e6 * ends / bandwidth, color="black", linewidth=1.2, label=label)
    axes.axhline(launch, color="0.4", linestyle="--", linewidth=1, label=f"empty kernel: {launch:.1f} us")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        steps = (1, 2, 5) if high < 50 * low else (1,)
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title(kernel, fontsize=10)
    axes.set_xlabel("bytes that cannot be avoided (MB)")
    axes.set_ylabel("median time of a launch (us)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
