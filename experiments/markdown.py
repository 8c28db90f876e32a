"""Estimates and tables as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from page4.experiments.statistics import Estimate


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells, a line per row."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def percent(estimate: Estimate) -> str:
    """`56.6 % [53.0, 60.3]` of an estimate in percent; `-` if there is none."""
    if math.isnan(estimate.value):
        return "-"
    interval = "" if math.isnan(estimate.low) else f" [{estimate.low:.1f}, {estimate.high:.1f}]"
    return f"{estimate.value:.1f} %{interval}"


def signed(estimate: Estimate, unit: str = "", interval: bool = True) -> str:
    """`-1.3 [-2.6, -0.3]` of a difference; the unit follows the value."""
    if math.isnan(estimate.value):
        return "-"
    shown = f"{estimate.value:+.1f}{unit}"
    if interval and not math.isnan(estimate.low):
        shown += f" [{estimate.low:+.1f}, {estimate.high:+.1f}]"
    return shown
