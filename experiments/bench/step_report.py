"""What a step bench leaves in its folder: summary, table and figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from page4.experiments.markdown import table
from page4.experiments.plots import Series, format_tokens, plot_step_times
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row
from page4.experiments.statistics import Estimate

_HEADER = (
    "length", "batch", "format", "step p50, ms", "p10 to p90", "of the first format", "tokens/s",
    "tokens a step and request", "launches", "kernels", "graph equals eager",
)  # fmt: skip


def write_report(results: ResultFolder, rows: Sequence[Row]) -> dict[str, Any]:
    """Write what is made from the rows of `step.csv`, and return what `summary.json` holds."""
    timed = [row for row in rows if row["step_p50_ms"] is not None]
    summary: dict[str, Any] = {
        "study": "bench step",
        "rows": len(rows),
        "wrong": sum(row["check"] == "WRONG" for row in rows),
        "failed": 0,
        "cells": [
            {name: row[name] for name in ("length", "batch", "kv_format", "step_p50_ms", "step_p90_ms")}
            | {"tokens_per_s": row["tokens_per_s"], "of_first_format": _quotient(row, rows)}
            for row in timed
        ],
    }
    results.write_json("summary.json", summary)
    results.write_text("table.md", markdown(rows))
    if timed:
        results.write_figure("step.png", figure(timed))
    return summary


def markdown(rows: Sequence[Row]) -> str:
    """One table, and what its columns mean."""
    note = (
        "A step verifies and drafts for all requests. Times are wall times between the outcomes of "
        "consecutive steps; formats take turns within a length and batch. Text is generated freely, so "
        "tokens/s depends on how many drafts that text accepts; step times do not."
    )
    return f"{table(_HEADER, [_cells(row, rows) for row in rows])}\n\n{note}\n"


def figure(rows: Sequence[Row]) -> Figure:
    """Median step time by length, a line per batch and format, with the 10th and 90th percentile."""
    series: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["batch"], row["length"])):
        series.setdefault(f"{row['kv_format']}, batch {row['batch']}", []).append(row)
    return plot_step_times(
        [
            Series(
                label,
                [row["length"] for row in members],
                [Estimate(r["step_p50_ms"], r["step_p10_ms"], r["step_p90_ms"], r["steps"]) for r in members],
            )
            for label, members in series.items()
        ],
        "Time of a decode step against context length",
        "Medians; bars from the 10th to the 90th percentile of the steps.",
    )


def _quotient(row: Row, rows: Sequence[Row]) -> float | None:
    """The row's median over that of the first format at the same length and batch."""
    cell = (row["length"], row["batch"])
    first = next(other for other in rows if (other["length"], other["batch"]) == cell)
    if row is first or row["step_p50_ms"] is None or first["step_p50_ms"] is None:
        return None
    return float(row["step_p50_ms"] / first["step_p50_ms"])


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    counts = ["-" if row[name] is None else str(row[name]) for name in ("launches", "kernels")]
    head = (format_tokens(row["length"]), str(row["batch"]), row["kv_format"])
    if row["step_p50_ms"] is None:
        return (*head, "-", "-", "-", "-", "-", *counts, row["check"])
    quotient = _quotient(row, rows)
    return (
        *head,
        f"{row['step_p50_ms']:.3f}",
        f"{row['step_p10_ms']:.3f} to {row['step_p90_ms']:.3f}",
        "-" if quotient is None else f"{quotient:.3f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['tokens_per_step']:.2f}",
        *counts,
        row["check"],
    )
