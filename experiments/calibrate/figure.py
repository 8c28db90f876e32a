"""The figure of a calibration: how large K and V are, and where their formats end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from page4.experiments.plots import COLOURS

_STYLES = ("-", "--", ":", "-.")


def plot_magnitudes(report: Mapping[str, Any]) -> Figure:
    """Histograms of log2 |K| and log2 |V|, a line per layer.

    A triangle on the axis marks the scale times the format's largest value: what lies right of it is clipped.
    """
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, part in zip(panels, ("k", "v"), strict=True):
        for index, (layer, pair) in enumerate(report["layers"].items()):
            _line(axes, index, layer if layer == "draft" else f"layer {layer}", pair[part])
        axes.set_title(part.upper(), fontsize=10)
        axes.set_xlabel(f"log2 |{part.upper()}|")
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("share of the values, per quarter octave")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9
    )
    figure.suptitle("Magnitudes in an FP16 cache", x=0.01, ha="left", fontsize=12)
    ends = f"{report['kv_format']} ends here by the rule {report['rule']}"
    note = f"{report['tokens']:,} tokens; triangles: {ends}"
    figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color="0.35")
    return figure


def _line(axes: Axes, index: int, label: str, found: Mapping[str, Any]) -> None:
    colour, style = COLOURS[index % len(COLOURS)], _STYLES[index // len(COLOURS) % len(_STYLES)]
    edges = [edge for edge, _ in found["log2_histogram"]]
    shares = [count / found["values"] or float("nan") for _, count in found["log2_histogram"]]
    axes.step(edges, shares, where="post", color=colour, linestyle=style, linewidth=1.2, label=label)
    axes.plot(
        found["log2_limit"], 0.01 + 0.03 * index, marker="v", color=colour, markersize=5,
        transform=axes.get_xaxis_transform(), linestyle="none",
    )  # fmt: skip
