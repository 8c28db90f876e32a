"""What a finished study leaves in its folder: summary, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page4.experiments.quant_error.config import QuantErrorConfig
from page4.experiments.quant_error.figures import Figures
from page4.experiments.quant_error.summary import (
    METRIC_COLUMNS,
    reference_arm,
    summarise,
    unquantised_format,
)
from page4.experiments.quant_error.table import markdown_table
from page4.experiments.quant_error.theory import rounding_error
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row


def write_report(
    results: ResultFolder, config: QuantErrorConfig, layers: Sequence[Row], logits: Sequence[Row]
) -> dict[str, Any]:
    """Summarise the samples, write every file made from them, and return the content of `summary.json`.

    `summary.csv` holds every estimate, `summary.json` those of the rows at the end of each length.
    """
    assert config.lengths is not None
    metrics = summarise(config, layers, logits)
    summary: dict[str, Any] = {
        "study": "quant-error",
        "arms": {
            arm.name: {
                "format": arm.kv_format,
                "rule": arm.rule,
                "rounding_error": rounding_error(arm.kv_format),
            }
            for arm in config.arms
        },
        "unquantised": unquantised_format(config),
        "reference": reference_arm(config),
        "lengths": list(config.lengths),
        "scored_tokens": config.scored_tokens,
        "prompts": config.num_prompts,
        "layers": metrics.layers,
        "logits": metrics.logits,
        "device": config.device,
        "dtype": config.dtype,
        "confidence": config.confidence,
    }
    results.write_json("summary.json", summary)
    results.write_csv("summary.csv", [m.to_row() for m in metrics.all], list(METRIC_COLUMNS))
    results.write_text("table.md", markdown_table(config, metrics))
    for name, figure in Figures(config, metrics).all().items():
        results.write_figure(name, figure)
    return summary
