"""What a finished study leaves in its folder: summary, tables and the figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from page4.experiments.acceptance.config import AcceptanceConfig
from page4.experiments.acceptance.metrics import METRIC_COLUMNS, Metrics
from page4.experiments.attribution.arms import HEADINGS, Condition
from page4.experiments.attribution.summary import costs_nothing, summarise
from page4.experiments.attribution.table import markdown
from page4.experiments.plots import ForestGroup, Series, format_tokens, plot_forest
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row


def write_report(
    results: ResultFolder, measured: AcceptanceConfig, conditions: Sequence[Condition], rows: Sequence[Row]
) -> dict[str, Any]:
    """Summarise the samples, write every file made from them, and return the content of `summary.json`."""
    metrics = summarise(measured, conditions, rows)
    records = [metric.to_row() for metric in metrics.all]
    lengths = list(measured.lengths or ())
    compared = [conditions[2], *(c for c in conditions if c.group == "formats")]
    summary: dict[str, Any] = {
        "study": "attribution",
        "baseline": measured.baseline.name,
        "format": conditions[2].arm.name,
        "arms": {
            c.arm.name: {
                "group": c.group,
                "what": c.says,
                "target": c.arm.target_format,
                "draft": c.arm.draft_format,
            }
            for c in conditions
        },
        "lengths": lengths,
        "num_draft_tokens": measured.num_draft_tokens,
        "prompts": measured.prompts_at(lengths[0]),
        "rounds_per_prompt": measured.rounds_per_prompt,
        "device": measured.device,
        "confidence": measured.confidence,
        "costs_nothing": {c.arm.name: costs_nothing(measured, metrics, c.arm.name) for c in compared},
    }
    results.write_json("summary.json", summary)
    results.write_csv("summary.csv", records, list(METRIC_COLUMNS))
    results.write_text("table.md", markdown(measured, conditions, metrics))
    results.write_figure("effects.png", plot_effects(measured, conditions, metrics))
    return summary


def plot_effects(measured: AcceptanceConfig, conditions: Sequence[Condition], metrics: Metrics) -> Figure:
    """What all arms but the baseline change of acceptance (points), group by group.

    Args:
        measured: How rounds were measured, see `planned`.
        conditions: Its arms.
        metrics: Of the finished study.
    """
    lengths = measured.lengths or ()
    groups = []
    for group, heading in HEADINGS.items():
        arms = [c for c in conditions if c.group == group and c.arm != measured.baseline]
        if arms:
            series = [
                Series(
                    f"{format_tokens(length)} tokens",
                    range(len(arms)),
                    [metrics.get("acceptance_difference", c.arm.name, length) for c in arms],
                )
                for length in lengths
            ]
            groups.append(ForestGroup(heading, [c.says for c in arms], series))
    sample = f"{measured.prompts_at(lengths[0])} prompts x {measured.rounds_per_prompt} rounds per length"
    return plot_forest(
        groups,
        "difference of acceptance to FP16 (percentage points)",
        f"What changes the acceptance of {measured.num_draft_tokens} MTP drafts",
        f"Greedy rounds from real text, {sample}; bars: {100 * measured.confidence:g} % bootstrap intervals "
        "over prompts",
    )
