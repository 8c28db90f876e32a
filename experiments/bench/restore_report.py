"""What a bench of restored prefixes leaves in its folder: summary, table and figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from page4.experiments.bench.restore_config import RestoreBenchConfig
from page4.experiments.markdown import table
from page4.experiments.plots import ForestGroup, Series, format_tokens, plot_forest
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row
from page4.experiments.statistics import Estimate

GOALS = {"speedup": 10.0, "copy_share": 0.8, "step_ratio": 1.05}
"""On an H200 at 32k: at least 10 times as fast as computing the prefix, at least 80 % of the bandwidth of
copies from pinned memory, and steps of others at most 5 % longer meanwhile."""

_HEADER = (
    "format", "restored, MB", "recompute, s", "restore p50 (p90), ms", "admission, ms", "speed-up",
    "copy, GB/s", "of pinned copies", "others' step p50 (p90), ms", "beside restores", "ratio", "bits",
)  # fmt: skip


def write_report(results: ResultFolder, config: RestoreBenchConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """Write what is made from the rows of `restore.csv`, and return what `summary.json` holds."""
    timed = [row for row in rows if row["check"] == "equal"]
    summary: dict[str, Any] = {
        "study": "bench restore",
        "rows": len(rows),
        "wrong": len(rows) - len(timed),
        "cells": [row | ratios(row) for row in timed],
        "goals": GOALS,
    }
    results.write_json("summary.json", summary)
    results.write_text("table.md", markdown(config, rows))
    if timed:
        results.write_figure("restore.png", figure(config, timed))
    return summary


def ratios(row: Row) -> dict[str, float]:
    """The quotients that the goals are about."""
    return {
        "speedup": 1000 * row["recompute_s"] / row["restore_p50_ms"],
        "copy_share": row["copy_gb_per_s"] / row["pinned_gb_per_s"],
        "step_ratio": row["step_beside_p50_ms"] / row["step_p50_ms"],
    }


def markdown(config: RestoreBenchConfig, rows: Sequence[Row]) -> str:
    """One table, and what its columns mean."""
    weights = (
        f"The model is the first {config.public_layers} layers of the public checkpoint's geometry and its "
        "MTP layer, with random weights. "
        if config.public_layers
        else ""
    )
    note = (
        f"{weights}A prefix of {format_tokens(config.length)} tokens is prefilled in chunks of "
        f"{config.prefill_chunk}, or brought back from the host tier to where it can be decoded. Copies "
        "are timed with the scattering of pages; plain copies from pinned memory have the size of a group. "
        f"Meanwhile {config.others} others decode; restores follow one another without a pause, and finding "
        "and launching each is within the steps' times."
    )
    return f"{table(_HEADER, [_cells(row) for row in rows])}\n\n{note}\n"


def figure(config: RestoreBenchConfig, rows: Sequence[Row]) -> Figure:
    """Times of a prefix, computed and restored, and of the others' steps, on a logarithmic axis."""
    labels = ("compute the prefix", "restore it", "others' step", "others' step beside restores")
    groups = []
    for row in rows:
        computed = 1000 * row["recompute_s"]
        estimates = [Estimate(computed, computed, computed, 1)]
        for name in ("restore", "step", "step_beside"):
            median, p90 = row[f"{name}_p50_ms"], row[f"{name}_p90_ms"]
            estimates.append(Estimate(median, median, p90, config.restores))
        series = Series("median", range(len(labels)), estimates)
        groups.append(ForestGroup(row["kv_format"], labels, [series]))
    drawn = plot_forest(
        groups,
        "time (ms)",
        f"A prefix of {format_tokens(config.length)} tokens, computed or restored",
        "Medians; lines reach to the 90th percentile.",
    )
    drawn.axes[0].set_xscale("log")
    return drawn


def _cells(row: Row) -> tuple[str, ...]:
    if row["check"] != "equal":
        return (row["kv_format"], *["-"] * (len(_HEADER) - 2), row["check"])
    quotients = ratios(row)
    return (
        row["kv_format"],
        f"{row['restored_bytes'] / 1e6:.1f}",
        f"{row['recompute_s']:.3g}",
        f"{row['restore_p50_ms']:.2f} ({row['restore_p90_ms']:.2f})",
        f"{row['admission_p50_ms']:.2f}",
        f"{quotients['speedup']:.1f}",
        f"{row['copy_gb_per_s']:.1f}",
        f"{100 * quotients['copy_share']:.0f} %",
        f"{row['step_p50_ms']:.2f} ({row['step_p90_ms']:.2f})",
        f"{row['step_beside_p50_ms']:.2f} ({row['step_beside_p90_ms']:.2f})",
        f"{quotients['step_ratio']:.3f}",
        row["check"],
    )
