"""What a finished study leaves in its folder: summary, table and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page4.experiments.acceptance.config import AcceptanceConfig
from page4.experiments.acceptance.figures import figures
from page4.experiments.acceptance.metrics import METRIC_COLUMNS
from page4.experiments.acceptance.summary import checks_summary, is_degenerate, summarise
from page4.experiments.acceptance.table import markdown_table, table_rows
from page4.experiments.result_folder import ResultFolder
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
    }
    results.write_json("summary.json", summary)
    results.write_csv("summary.csv", records, list(METRIC_COLUMNS))
    results.write_text("table.md", markdown_table(config, metrics, summary))
    for name, figure in figures(config, metrics).items():
        results.write_figure(name, figure)
    return summary
