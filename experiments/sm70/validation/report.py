"""The report of a validation: what was measured, how far predictions are off, and which goals are met."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.cells import cell_label
from page4.experiments.sm70.prediction.goals import Verdict, judge, judge_step_kernels
from page4.experiments.sm70.validation.predictions import ATTENTION, Predictions

_HEADER = (
    "call", "requests x rows, heads, format", "implementation", "predicted, us", "measured, us", "p10 to p90",
    "measured / predicted", "error / permitted", "configuration",
)  # fmt: skip

NOTE = (
    "Measured is the median of calls between two events, each behind a kernel that writes 1 GiB, so that L2 "
    "is full of dirty lines as the predictions assume; the time of an empty call, {launch:.1f} us, is taken "
    "off. Gaps between the launches of one call are in it, and are not in the prediction. Every result was "
    "compared with float64, or exactly where it is exact, before it was timed: the error is a share of what "
    "is permitted."
)
OTHER_GPU = (
    "**This is no V100.** The kernels that ran here are other machine code than what was predicted, on other "
    "hardware: the times say nothing of the predictions, and nothing is compared. The run shows that the "
    "command works."
)
SEND = "Please send this whole folder back, whatever it says: as a pull request or attached to an issue."
BANDS = (0.15, 0.3)


def write_report(
    results: ResultFolder, rows: Sequence[Row], predictions: Predictions, gpu: str, compared: bool
) -> dict[str, Any]:
    """Judge the rows, write `report.md` and `summary.json`, and return what the latter holds."""
    timed = [row for row in rows if row["measured_us"] is not None]
    verdicts = _verdicts(timed, predictions) if compared else []
    statuses = [row["status"] for row in rows]
    summary: dict[str, Any] = {
        "study": "sm70 validate",
        "gpu": gpu,
        "is_v100": compared,
        "rows": len(rows),
        "status": {name: statuses.count(name) for name in sorted(set(statuses))},
        "agreement": agreement(timed) if compared else None,
        "goals_met": sum(verdict.met for verdict in verdicts),
        "goals_missed": sum(not verdict.met for verdict in verdicts),
        "goals": [
            {"cell": v.cell, "what": v.what, "bar": v.bar, "measured": v.predicted, "met": v.met}
            for v in verdicts
        ],
    }
    results.write_json("summary.json", summary)
    results.write_text("report.md", markdown(rows, verdicts, summary))
    return summary


def agreement(timed: Sequence[Row]) -> dict[str, Any] | None:
    """How far measurements are from predictions: median ratio, shares within bands, and rank correlation.

    The correlation is Spearman's, over all rows: None with fewer than three.
    """
    if not timed:
        return None
    ratios = [row["ratio"] for row in timed]
    within = {
        f"within {100 * band:.0f} %": sum(1 / (1 + band) <= ratio <= 1 + band for ratio in ratios)
        / len(ratios)
        for band in BANDS
    }
    return {
        "compared": len(ratios),
        "median_ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
        **within,
        "rank_correlation": _rank_correlation(timed),
    }


def _rank_correlation(timed: Sequence[Row]) -> float | None:
    if len(timed) < 3:
        return None
    predicted, measured = (
        torch.tensor([row[name] for row in timed], dtype=torch.float64).argsort().argsort().double()
        for name in ("predicted_us", "measured_us")
    )
    return float(torch.corrcoef(torch.stack((predicted, measured)))[0, 1])


def _verdicts(timed: Sequence[Row], predictions: Predictions) -> list[Verdict]:
    """The goals with measured times in the predictions' place."""
    attention = [row | {"predicted_us": row["measured_us"]} for row in timed if row["kernel"] == ATTENTION]
    others = [
        row | {"predicted_us": row["measured_us"], "floor_fraction": row["floor_us"] / row["measured_us"]}
        for row in timed
        if row["kernel"] != ATTENTION
    ]
    return judge(attention, predictions.config) + judge_step_kernels(others)


def markdown(rows: Sequence[Row], verdicts: Sequence[Verdict], summary: dict[str, Any]) -> str:
    """The report for people."""
    parts = [f"# Measured on {summary['gpu']}, beside what was predicted for a V100"]
    if not summary["is_v100"]:
        parts.append(OTHER_GPU)
    found = summary["agreement"]
    if found is not None:
        bands = ", ".join(f"{100 * found[name]:.0f} % {name}" for name in found if name.startswith("within"))
        parts.append(
            f"{found['compared']} times compared: measured over predicted is {found['median_ratio']:.2f} in "
            f"the median, {found['least_ratio']:.2f} to {found['largest_ratio']:.2f}; {bands}; "
            f"rank correlation {_number(found['rank_correlation'])}."
        )
    parts.append(_table(_HEADER, map(_cells, rows)))
    launch = next((row["launch_us"] for row in rows if row["launch_us"] is not None), math.nan)
    parts.append(NOTE.format(launch=launch))
    if verdicts:
        parts.append(f"**Goals, {summary['goals_met']} of {len(verdicts)} met**")
        parts.append(_table(("step", "what", "goal", "measured", "verdict"), (v.cells() for v in verdicts)))
    parts.append(SEND)
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    head = (row["kernel"], cell_label(row), row["implementation"], f"{row['predicted_us']:.1f}")
    if row["measured_us"] is None:
        return (*head, "-", "-", "-", _number(row["error"]), f"{row['status']} {row['config']}".strip())
    same = row["config"].split(" (")[0] == row["predicted_config"].split(" (")[0]
    other = "" if same or not row["predicted_config"] else f"; predicted: {row['predicted_config']}"
    return (
        *head,
        f"{row['measured_us']:.1f}",
        f"{row['p10_us']:.1f} to {row['p90_us']:.1f}",
        _number(row["ratio"]),
        _number(row["error"]),
        f"{row['config'] or '-'}{other}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
