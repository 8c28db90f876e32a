"""What a finished study leaves in its folder: summary, table and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.acceptance.metrics import METRIC_COLUMNS, Metrics
from page4.experiments.acceptance.summary import checks_summary, is_degenerate, summarise
from page4.experiments.acceptance.table import markdown_table, table_rows
from page4.experiments.plots import (
    Series,
    format_tokens,
    plot_acceptance,
    plot_by_position,
    plot_difference,
)
from page4.experiments.results import ResultFolder
from page4.experiments.samples import Row


def write_report(
    results: ResultFolder,
    config: AcceptanceConfig,
    rounds: Sequence[Row],
    generations: Sequence[Row],
    checks: Sequence[Row],
) -> dict[str, Any]:
    """Summarise the samples, write every file made from them, and return the content of `summary.json`."""
    metrics = summarise(config, rounds, generations)
    records = [metric.to_row() for metric in metrics.all]
    degenerate = [row for row in generations if is_degenerate(config, row)]
    summary: dict[str, Any] = {
        "study": "acceptance",
        "baseline": config.baseline.name,
        "controls": [arm.name for arm in config.controls],
        "arms": {
            arm.name: {"target": arm.target_format, "draft": arm.draft_format} for arm in config.all_arms
        },
        "lengths": list(config.lengths or ()),
        "num_draft_tokens": config.num_draft_tokens,
        "temperature": config.temperature,
        "prompts": {str(length): config.prompts_at(length) for length in config.lengths or ()},
        "rounds_per_prompt": config.rounds_per_prompt,
        "device": config.device,
        "confidence": config.confidence,
        "table": table_rows(config, metrics),
        "checks": checks_summary(checks),
        "generation": {
            "samples": len(generations),
            "degenerate": len(degenerate),
            "degenerate_by_arm": {
                arm.name: sum(row["arm"] == arm.name for row in degenerate) for arm in config.all_arms
            },
        },
        "metrics": records,
    }
    results.write_json("summary.json", summary)
    results.write_csv("summary.csv", records, METRIC_COLUMNS)
    results.write_text("table.md", markdown_table(config, metrics, summary))
    _write_figures(results, config, metrics)
    return summary


def _write_figures(results: ResultFolder, config: AcceptanceConfig, metrics: Metrics) -> None:
    lengths = config.lengths or ()
    base, controls = config.baseline, config.controls
    percent = f"{100 * config.confidence:g} %"
    sample = f"{config.prompts_at(lengths[0])} prompts x {config.rounds_per_prompt} rounds per length"
    if not config.lengths_are_paired:
        fewest = config.prompts_at(lengths[-1])
        sample += f" (down to {fewest} at {format_tokens(lengths[-1])}: compare arms, not lengths)"
    bars = f"bars: {percent} bootstrap intervals over prompts"

    def series(name: str, arm: Arm, label: str) -> Series:
        return Series(label, lengths, [metrics.get(name, arm.name, length) for length in lengths])

    results.write_figure(
        "acceptance.png",
        plot_acceptance(
            [series("acceptance", arm, arm_label(arm)) for arm in config.all_arms],
            f"Acceptance of {config.num_draft_tokens} MTP drafts against context length",
            f"{config.kind_of_rounds.capitalize()} from real text, {sample}; {bars}",
        ),
    )
    if config.treated:
        noise = series("acceptance_difference", controls[0], f"A/A: {controls[0].name}") if controls else None
        results.write_figure(
            "difference.png",
            plot_difference(
                [series("acceptance_difference", arm, arm_label(arm)) for arm in config.treated],
                noise,
                f"Difference of acceptance to {base.name} on the same prompts",
                f"{sample}; {bars}" + ("; band: the same for the A/A control" if controls else ""),
            ),
        )
    positions = range(1, config.num_draft_tokens + 1)
    panels = [
        (
            f"{format_tokens(length)} tokens",
            [
                Series(
                    arm.name,
                    positions,
                    [metrics.get("acceptance_at", arm.name, length, position) for position in positions],
                )
                for arm in config.all_arms
            ],
        )
        for length in lengths
    ]
    results.write_figure(
        "positions.png", plot_by_position(panels, "Acceptance by draft position", f"{sample}; {bars}")
    )


def arm_label(arm: Arm) -> str:
    """Name of the arm and what it stores, where the name does not say it."""
    if arm.target_format == arm.draft_format:
        return arm.name
    return f"{arm.name} (target {arm.target_format}, draft {arm.draft_format})"
