"""The figures of the study, from its estimates alone, so that they can be drawn again from `summary.csv`."""

from __future__ import annotations

from matplotlib.figure import Figure

from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.acceptance.metrics import Metrics
from page4.experiments.plots import (
    Series,
    format_tokens,
    plot_acceptance,
    plot_by_position,
    plot_difference,
)
from page4.experiments.statistics import LEAST_CLUSTERS, TOO_FEW_PROMPTS


def figures(config: AcceptanceConfig, metrics: Metrics) -> dict[str, Figure]:
    """Every figure by file name; there is no difference where no arm has other formats.

    Args:
        config: Resolved.
        metrics: Of the finished study.
    """
    drawn = {"acceptance.png": _acceptance(config, metrics)}
    if config.treated:
        drawn["difference.png"] = _difference(config, metrics)
    return drawn | {"positions.png": _by_position(config, metrics)}


def arm_label(arm: Arm) -> str:
    """Name of the arm and what it stores, where the name does not say it."""
    if arm.target_format == arm.draft_format:
        return arm.name
    return f"{arm.name} (target {arm.target_format}, draft {arm.draft_format})"


def _acceptance(config: AcceptanceConfig, metrics: Metrics) -> Figure:
    return plot_acceptance(
        [_by_length(config, metrics, "acceptance", arm) for arm in config.all_arms],
        f"Acceptance of {config.num_draft_tokens} MTP drafts against context length",
        f"{config.kind_of_rounds.capitalize()} from real text, {_note(config)}",
    )


def _difference(config: AcceptanceConfig, metrics: Metrics) -> Figure:
    series = [_by_length(config, metrics, "acceptance_difference", arm) for arm in config.treated]
    noise, control_note = None, ""
    if config.controls:
        control = config.controls[0]
        noise = _by_length(config, metrics, "acceptance_difference", control, f"A/A: {control.name}")
        mark = "band: the same for" if config.most_prompts >= LEAST_CLUSTERS else "dashed:"
        control_note = f"; {mark} the A/A control"
    title = f"Difference of acceptance to {config.baseline.name} on the same prompts"
    return plot_difference(series, noise, title, _note(config) + control_note)


def _by_position(config: AcceptanceConfig, metrics: Metrics) -> Figure:
    positions = range(1, config.num_draft_tokens + 1)

    def series(arm: Arm, length: int) -> Series:
        estimates = [metrics.get("acceptance_at", arm.name, length, position) for position in positions]
        return Series(arm.name, positions, estimates)

    panels = [
        (f"{format_tokens(length)} tokens", [series(arm, length) for arm in config.all_arms])
        for length in config.lengths or ()
    ]
    return plot_by_position(panels, "Acceptance by draft position", _note(config))


def _by_length(
    config: AcceptanceConfig, metrics: Metrics, name: str, arm: Arm, label: str | None = None
) -> Series:
    lengths = config.lengths or ()
    return Series(label or arm_label(arm), lengths, [metrics.get(name, arm.name, n) for n in lengths])


def _note(config: AcceptanceConfig) -> str:
    """What the sample is and what the bars are; a longer one has two lines, as long as a figure is wide."""
    lengths = config.lengths or ()
    sample = f"{config.most_prompts} prompts x {config.rounds_per_prompt} rounds per length"
    if config.lengths_are_paired:
        return f"{sample}; {_bars(config)}"
    fewest = f"down to {config.fewest_prompts} at {format_tokens(lengths[-1])}"
    return f"{sample} ({fewest}: compare arms, not lengths);\n{_bars(config)}"


def _bars(config: AcceptanceConfig) -> str:
    """What the bars are, of those lengths that have any."""
    if config.most_prompts < LEAST_CLUSTERS:
        return TOO_FEW_PROMPTS
    some = "" if config.fewest_prompts >= LEAST_CLUSTERS else f", where there are at least {LEAST_CLUSTERS}"
    return f"bars: {100 * config.confidence:g} % bootstrap intervals over prompts{some}"
