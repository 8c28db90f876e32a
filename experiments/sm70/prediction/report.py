"""What the study leaves in its folder: summary, table and figure. Every time is called predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page4.experiments.markdown import table
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.cells import cell_label
from page4.experiments.sm70.prediction.config import PredictConfig
from page4.experiments.sm70.prediction.figure import plot_roofline
from page4.experiments.sm70.prediction.goals import Verdict, judge, judge_step_kernels
from page4.experiments.sm70.predictor.machine import STREAM_BYTES_PER_SECOND

_HEADER = (
    "requests x rows, heads, format", "implementation", "predicted, us", "of it merge", "floor, us",
    "floor / predicted", "bound by", "registers", "spills", "warps", "configuration", "emulated blocks",
)  # fmt: skip

_KERNEL_HEADER = (
    "call", "requests x rows, tokens", "predicted, us", "floor, us", "floor / predicted", "bound by",
    "registers", "spills", "launches, us", "emulated blocks",
)  # fmt: skip

_GOAL_HEADER = ("step", "what", "goal", "predicted", "verdict")

_NOTE = (
    "All times are predicted, none was measured: machine code of Triton 3.6 for sm_70, executed on the "
    "CPU and replayed through a model of a V100 (80 multiprocessors, 1.53 GHz). Against published times "
    "of Triton kernels the model is 0 to 12 % slow for additions of 4 M numbers and more, 15 to 30 % for "
    "shorter ones, and gives matrix products on tensor cores 5 to 20 % too little of the peak; gaps under "
    "15 % say nothing about an order. L2 is full of other kernels' dirty lines when attention starts; the "
    "merge finds what attention left there. Launching is not included. The floor is the bytes that cannot "
    "be avoided at {bandwidth:.0f} GB/s. Programs of {sampled} of the requests are emulated, all are "
    "replayed."
)


def write_report(
    results: ResultFolder, rows: Sequence[Row], kernels: Sequence[Row], config: PredictConfig
) -> dict[str, Any]:
    """Judge the rows, write what is made from them, and return what `summary.json` holds."""
    verdicts = judge(rows, config) + judge_step_kernels(kernels)
    timed = [row for row in rows if row["predicted_us"] is not None]
    everything = [*rows, *kernels]
    summary: dict[str, Any] = {
        "study": "sm70 predict",
        "measured": False,
        "rows": len(rows),
        "predicted": len(timed),
        "step_kernels": len(kernels),
        "refused": sum(row["status"] == "refused" for row in everything),
        "failed": sum(row["status"] == "failed" for row in everything),
        "goals_met": sum(verdict.met for verdict in verdicts),
        "goals_missed": sum(not verdict.met for verdict in verdicts),
        "goals": [verdict.to_json() for verdict in verdicts],
        "seconds": sum(row["seconds"] or 0.0 for row in everything),
    }
    results.write_json("summary.json", summary)
    results.write_text("table.md", markdown(rows, kernels, verdicts, config.sampled_requests))
    if timed:
        title = "Attention and merge on a V100, PREDICTED, and the floors of memory and arithmetic"
        results.write_figure("roofline.png", plot_roofline(timed, title))
    return summary


def markdown(
    rows: Sequence[Row], kernels: Sequence[Row], verdicts: Sequence[Verdict], sampled_requests: int
) -> str:
    """The tables, the goals, and what the numbers are."""
    parts = ["**Attention and merge on a V100, predicted**", table(_HEADER, [_cells(row) for row in rows])]
    if kernels:
        parts.append("**Other calls of a step on a V100, predicted**")
        parts.append(calls_table(kernels))
    parts.append(note(sampled_requests))
    if verdicts:
        met = sum(verdict.met for verdict in verdicts)
        parts.append(f"**Goals, {met} of {len(verdicts)} met if the predictions hold**")
        parts.append(goals_table(verdicts))
    return "\n\n".join(parts) + "\n"


def note(sampled_requests: int) -> str:
    """What the numbers are, and how far they can be trusted."""
    return _NOTE.format(bandwidth=STREAM_BYTES_PER_SECOND / 1e9, sampled=sampled_requests)


def calls_table(kernels: Sequence[Row]) -> str:
    """The calls of a step beside attention, a row each."""
    return table(_KERNEL_HEADER, [_kernel_cells(row) for row in kernels])


def goals_table(verdicts: Sequence[Verdict]) -> str:
    """A row per goal."""
    return table(_GOAL_HEADER, [verdict.cells() for verdict in verdicts])


def _kernel_cells(row: Row) -> tuple[str, ...]:
    head = (row["kernel"], f"{row['requests']} x {row['rows']}, {row['context']}")
    if row["predicted_us"] is None:
        reason = f"{row['status']}: {row['launches']}".replace("|", "/")
        return (*head, *["-"] * (len(_KERNEL_HEADER) - 4), reason, "-")
    return (
        *head,
        f"{row['predicted_us']:.1f}",
        f"{row['floor_us']:.1f}",
        f"{100 * row['floor_fraction']:.0f} %",
        row["bound"],
        str(row["registers"]),
        str(row["spills"]),
        row["launches"],
        f"{row['emulated_blocks']} of {row['blocks']}",
    )


def _cells(row: Row) -> tuple[str, ...]:
    head = (cell_label(row), row["implementation"])
    if row["predicted_us"] is None:
        reason = f"{row['status']}: {row['config']}".replace("|", "/")
        return (*head, *["-"] * (len(_HEADER) - 4), reason, "-")
    return (
        *head,
        f"{row['predicted_us']:.1f}",
        f"{row['merge_us']:.1f}",
        f"{row['floor_us']:.1f}",
        f"{100 * row['floor_fraction']:.0f} %",
        row["bound"],
        str(row["registers"]),
        str(row["spills"]),
        f"{row['warps_per_multiprocessor']} ({row['occupancy_limit']})",
        row["config"],
        f"{row['emulated_blocks']} of {row['blocks']}",
    )
