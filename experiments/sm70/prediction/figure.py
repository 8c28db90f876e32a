"""The roofline of predicted attention times, with the floors of memory and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from page4.experiments.plots import COLOURS, MARKERS
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.config import IMPLEMENTATIONS
from page4.experiments.sm70.predictor.machine import FP32_FLOPS, STREAM_BYTES_PER_SECOND, TENSOR_FLOPS
from page4.kernels.codecs import STORAGE_DTYPES

_ORDER: tuple[str, ...] = IMPLEMENTATIONS
_NAMES = {"gluon": "tensor cores", "triton": "plain tl.dot"}


def plot_roofline(rows: Sequence[Row], title: str) -> Figure:
    """Predicted time (us) against the bytes that cannot be avoided (MB), a panel per rows and heads.

    Both axes are logarithmic. The solid line is what the bytes take at the bandwidth that streams reach; the
    dashed ones what the products of the panel's first format take on tensor cores and in FP32. `rows` are
    those with a time, at least one.
    """
    panels: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["rows"], row["query_heads"], row["kv_heads"]), []).append(row)
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * lines + 0.8), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    formats = list(dict.fromkeys(row["kv_format"] for row in rows))
    for place, ((query_rows, query_heads, kv_heads), members) in zip(axes, panels.items(), strict=False):
        _panel(place, members, formats)
        plural = "" if query_rows == 1 else "s"
        place.set_title(f"{query_rows} row{plural} a request, {query_heads}/{kv_heads} heads", fontsize=10)
    for place in axes[len(panels) :]:
        place.remove()
    handles = {
        label: handle
        for place in axes[: len(panels)]
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], formats: Sequence[str]) -> None:
    """A marker tells the implementation, a colour the format."""
    series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        series.setdefault((row["implementation"], row["kv_format"]), []).append(row)
    for (implementation, kv_format), members in series.items():
        axes.plot(
            [row["floor_bytes"] / 1e6 for row in members],
            [row["predicted_us"] for row in members],
            linestyle="none",
            marker=MARKERS[_ORDER.index(implementation)],
            markersize=5,
            color=COLOURS[formats.index(kv_format) % len(COLOURS)],
            label=f"{_NAMES[implementation]}, {kv_format}",
        )
    ends = np.array(
        [min(row["floor_bytes"] for row in rows) / 1.5, max(row["floor_bytes"] for row in rows) * 1.5]
    )
    memory = f"floor: {STREAM_BYTES_PER_SECOND / 1e9:.0f} GB/s"
    axes.plot(ends / 1e6, 1e6 * ends / STREAM_BYTES_PER_SECOND, color="black", linewidth=1.2, label=memory)
    # Two products of two operations for every number of K and V and every query that meets it.
    first = rows[0]
    queries = first["rows"] * first["query_heads"] // first["kv_heads"]
    intensity = 2 * queries / STORAGE_DTYPES[first["kv_format"]].itemsize
    for label, peak, style in (("FP32", FP32_FLOPS, "--"), ("tensor cores", TENSOR_FLOPS, ":")):
        axes.plot(
            ends / 1e6, 1e6 * ends * intensity / peak, color="0.4", linestyle=style, linewidth=1,
            label=f"floor: {label}, {peak / 1e12:g} TFLOP/s ({first['kv_format']})",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes that cannot be avoided (MB)")
    axes.set_ylabel("predicted time (us)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
