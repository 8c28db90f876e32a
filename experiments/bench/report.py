"""What a bench leaves in its folder: summary, table and figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page4.experiments.bench.cells import shape_label
from page4.experiments.bench.figure import plot_roofline
from page4.experiments.bench.goals import Verdict, judge
from page4.experiments.markdown import table
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row

_HEADER = (
    "shape", "implementation", "time, us", "p10 to p90", "floor, us", "of copy bandwidth", "goal", "check",
)  # fmt: skip


def write_report(results: ResultFolder, rows: Sequence[Row], absent: Sequence[Row]) -> dict[str, Any]:
    """Judge the rows of `bench.csv`, write what is made from them, and return what `summary.json` holds."""
    verdicts = judge(rows)
    timed = [row for row in rows if row["median_us"] is not None]
    summary: dict[str, Any] = {
        "study": "bench",
        "rows": len(rows),
        "timed": len(timed),
        "wrong": sum(row["status"] == "wrong" for row in rows),
        "failed": sum(row["status"] == "failed" for row in rows),
        "no_room": sum(row["status"] == "no room" for row in rows),
        "copy_bandwidth": max((row["copy_bandwidth"] for row in timed), default=None),
        "launch_us": min((row["launch_us"] for row in timed), default=None),
        "goals_met": sum(v.met is True for v in verdicts),
        "goals_missed": sum(v.met is False for v in verdicts),
        "goals": [verdict.to_json() for verdict in verdicts],
        "absent": _reasons(absent),
    }
    results.write_json("summary.json", summary)
    results.write_text("table.md", markdown(rows, verdicts, summary))
    if timed:
        title = "Time of a launch on cold caches, and what its bytes take at the copy bandwidth"
        results.write_figure("roofline.png", plot_roofline(rows, title))
    return summary


def markdown(rows: Sequence[Row], verdicts: Sequence[Verdict], summary: dict[str, Any]) -> str:
    """A table per kernel, and what has no row, as Markdown. `summary` is the content of `summary.json`."""
    goals: dict[int, list[str]] = {}
    for verdict in verdicts:
        goals.setdefault(id(verdict.row), []).append(verdict.text())
    parts = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        lines = [_cells(row, goals.get(id(row), [])) for row in rows if row["kernel"] == kernel]
        parts.append(f"**{kernel}**\n\n" + table(_HEADER, lines))
    parts.append(_notes(summary))
    return "\n\n".join(parts) + "\n"


def goals_table(verdicts: Sequence[Verdict]) -> str:
    """A row per goal and cell that it applies to, as Markdown."""
    return table(
        ("kernel", "shape", "implementation", "goal"),
        [(v.row["kernel"], shape_label(v.row), v.row["implementation"], v.text()) for v in verdicts],
    )


def _cells(row: Row, goals: Sequence[str]) -> tuple[str, ...]:
    name = row["implementation"] + (" *" if row["chosen"] else "")
    if row["median_us"] is None:
        reason = {
            "wrong": f"WRONG: error {row['error']:.3g} of what is permitted" if row["error"] else "WRONG",
            "failed": f"FAILED: {row['config']}",
            "no room": f"not measured: {row['config']}",
        }[row["status"]]
        return (shape_label(row), name, "-", "-", "-", "-", "; ".join(goals), reason.replace("|", "/"))
    return (
        shape_label(row),
        name,
        f"{row['median_us']:.1f}",
        f"{row['p10_us']:.1f} to {row['p90_us']:.1f}",
        f"{row['floor_us']:.1f}",
        f"{100 * row['floor_fraction']:.0f} %" + ("" if row["cold"] else " (not cold)"),
        "; ".join(goals),
        f"{row['error']:.2f} in {row['checked_groups']} of {row['groups']} groups",
    )


def _notes(summary: dict[str, Any]) -> str:
    lines = []
    if summary["copy_bandwidth"] is not None:
        lines.append(
            f"Measured ceilings: copies {summary['copy_bandwidth'] / 1e9:.0f} GB/s, an empty kernel "
            f"{summary['launch_us']:.1f} us. Shapes are requests x rows, query/KV heads, context, overlap "
            "and format, as far as they matter. Times are medians of a launch in a CUDA graph; the floor is "
            "the bytes that cannot be avoided over the copy bandwidth. The check is the largest error as a "
            "share of what is permitted. * is what the model gets on this machine."
        )
    bad = summary["wrong"] + summary["failed"]
    if bad:
        lines.append(f"{summary['wrong']} wrong and {summary['failed']} failed rows: they have no time.")
    lines.append(f"Goals: {summary['goals_met']} met, {summary['goals_missed']} missed.")
    lines += [
        f"No {name} row in {count} cells: {reason}."
        for name, reasons in summary["absent"].items()
        for reason, count in reasons.items()
    ]
    return "\n\n".join(lines)


def _reasons(absent: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Cells without a row, counted by implementation and reason."""
    counted: dict[str, dict[str, int]] = {}
    for row in absent:
        reasons = counted.setdefault(row["implementation"], {})
        reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    return counted
