"""What a throughput study leaves in its folder: summary, table and figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import figure

from page4.experiments import markdown
from page4.experiments.plots import Series, format_tokens, plot_changes
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row, read_samples
from page4.experiments.statistics import LEAST_CLUSTERS
from page4.experiments.throughput.config import ThroughputConfig
from page4.experiments.throughput.summary import COLUMNS, Figure, figures

_TITLES = {
    "prefill": "prefill",
    "decode": "decode",
    "tokens_per_step": "tokens/step",
    "acceptance": "MTP acceptance",
    "step_p50": "step p50",
    "step_p90": "step p90",
}
_UNITS = {"prefill": "tokens/s", "decode": "tokens/s", "step_p50": "ms", "step_p90": "ms"}
Found = Mapping[tuple[str, str, str | None, int], Figure]
"""By quantity, arm, the arm that it is compared with (None: the baseline's own) and length."""


def write_report(results: ResultFolder, config: ThroughputConfig, rows: Sequence[Row]) -> dict[str, Any]:
    """Write what is made from the samples, and return what `summary.json` holds."""
    found = {figure.key: figure for figure in figures(config, rows)}
    records = [f.to_row() for f in found.values()]
    summary: dict[str, Any] = {
        "study": "throughput",
        "samples": len(rows),
        "reused_tokens": sum(row["reused_tokens"] for row in rows),
        "figures": records,
    }
    results.write_json("summary.json", summary)
    results.write_csv("summary.csv", records, list(COLUMNS))
    results.write_text("table.md", table(config, found, rows))
    if config.all_arms[1:]:
        results.write_figure("throughput.png", plot_throughput(config, found))
    return summary


def read_found(file: Path) -> Found:
    """The estimates that a study left in its `summary.csv`.

    Raises:
        InputError: Other columns, or a cell that is not of its column's type.
    """
    return {figure.key: figure for figure in map(Figure.from_row, read_samples(file, COLUMNS))}


def plot_throughput(config: ThroughputConfig, found: Found) -> figure.Figure:
    """What every arm but the baseline changes, in percent: a panel per quantity; there is such an arm."""
    panels = [
        (_TITLES[quantity], [_series(config, found, quantity, arm.name) for arm in config.all_arms[1:]])
        for quantity in _quantities(found)
    ]
    title = f"Change against {config.all_arms[0].name} on the same prompts"
    return plot_changes(panels, title, _sample(config))


def table(config: ThroughputConfig, found: Found, rows: Sequence[Row]) -> str:
    """The baseline's rates, then the changes of every comparison."""
    base = config.all_arms[0]
    quantities = _quantities(found)
    header = ["prompt", *(f"{_TITLES[q]}, {_UNITS[q]}" if q in _UNITS else _TITLES[q] for q in quantities)]
    parts = [
        f"**{base.name}**",
        markdown.table(header, [_absolute(found, base.name, n) for n in config.lengths or ()]),
    ]
    for arm, other in config.comparisons:
        changes = [
            [
                format_tokens(length),
                *(_change(found[quantity, arm.name, other.name, length]) for quantity in quantities),
            ]
            for length in config.lengths or ()
        ]
        parts.append(f"**{arm.name} against {other.name}**")
        parts.append(markdown.table(["prompt", *(_TITLES[q] for q in quantities)], changes))
    parts.append(_sample(config))
    loops = sum(row["repeated_4grams"] > 0.2 for row in rows)
    reused = sum(row["reused_tokens"] for row in rows)
    parts.append(
        f"Every prompt begins with a nonce of its own; {reused} prompt tokens were found in a cache. "
        + (
            f"Weights are random: the first {config.public_layers} layers and the MTP head of the public "
            "model at full size, with smaller n-gram tables. Only times mean something."
            if config.public_layers
            else f"{loops} of {len(rows)} continuations repeat more than 20 % of their 4-grams."
        )
    )
    return "\n\n".join(parts) + "\n"


def _quantities(found: Found) -> list[str]:
    return [name for name in _TITLES if any(quantity == name for quantity, *_ in found)]


def _absolute(found: Found, base: str, length: int) -> list[str]:
    cells = [format_tokens(length)]
    for quantity in _quantities(found):
        value = found[quantity, base, None, length].value.value
        digits = {"prefill": 0, "decode": 0, "acceptance": 3}.get(quantity, 2)
        cells.append("-" if math.isnan(value) else f"{value:,.{digits}f}")
    return cells


def _change(figure: Figure) -> str:
    assert figure.change is not None
    return markdown.signed(figure.change, " %")


def _series(config: ThroughputConfig, found: Found, quantity: str, arm: str) -> Series:
    base, lengths = config.all_arms[0].name, config.lengths or ()
    changes = [found[quantity, arm, base, length].change for length in lengths]
    return Series(arm, lengths, [change for change in changes if change is not None])


def _sample(config: ThroughputConfig) -> str:
    builds = config.builds or 1  # what a study had whose configuration does not say
    return (
        f"{config.num_prompts} prompts of every length, one at a time, {config.steps} timed steps of "
        f"{config.num_draft_tokens} drafts, temperature {config.temperature:g}, on {config.device}, "
        f"{builds} decoder{'' if builds == 1 else 's'} an arm; "
        f"{100 * config.confidence:g} % bootstrap intervals over prompts, from {LEAST_CLUSTERS} prompts on"
    )
