"""The table of the study: what an arm costs or gains against the baseline, by context length."""

from __future__ import annotations

from typing import Any

from page4.experiments.acceptance.config import AcceptanceConfig, Arm
from page4.experiments.acceptance.metrics import ALL_LENGTHS, Metrics
from page4.experiments.markdown import percent, signed, table
from page4.experiments.plots import format_tokens
from page4.experiments.statistics import LEAST_CLUSTERS, TOO_FEW_PROMPTS

_LEAST_BATCHES = 3
"""Fewest batches whose median quotient is shown as a change of speed."""

CHANGES = {
    "acceptance_change": "acceptance, relative",
    "tokens_per_step_change": "tokens/step",
    "prefill_rate_change": "prefill",
    "decode_rate_change": "decode",
    "step_p50_change": "step p50",
    "step_p90_change": "step p90",
}
"""Columns of relative changes, in percent; positive prefill and decode are faster, positive steps slower."""


def table_rows(config: AcceptanceConfig, metrics: Metrics) -> list[dict[str, Any]]:
    """The table as numbers, a record per compared arm and length."""
    base, controls = config.baseline.name, config.controls
    rows = []
    for arm in config.treated or config.controls:
        for length in _lengths(config):
            row: dict[str, Any] = {"arm": arm.name, "length": length}
            row["baseline_acceptance"] = metrics.get("acceptance", base, length).to_json()
            for name in ("acceptance_difference", *CHANGES):
                row[name] = metrics.get(name, arm.name, length).to_json()
            if controls:
                noise = metrics.get("acceptance_difference", controls[0].name, length)
                row["control_acceptance_difference"] = noise.to_json()
            rows.append(row)
    return rows


def markdown_table(config: AcceptanceConfig, metrics: Metrics, summary: dict[str, Any]) -> str:
    """The tables by length and by text, and what the controls found, as Markdown.

    `summary` is the content of `summary.json`, of which "checks" and "generation" are used.
    """
    parts = [_by_length(config, metrics, arm) for arm in config.treated or config.controls]
    parts.append(_notes(config))
    parts += _over_texts(config, metrics)
    parts.append(_by_drafts(config, metrics))
    parts.append(_by_text(config, metrics))
    parts += [_check_line(name, by_arm) for name, by_arm in summary["checks"].items()]
    free = summary["generation"]
    if free["samples"]:
        parts.append(
            f"Free generation: {free['degenerate']} of {free['samples']} continuations repeat more than "
            f"{100 * config.max_repeated_4grams:g} % of their 4-grams; their acceptance is not counted."
        )
    return "\n\n".join(parts) + "\n"


def _by_length(config: AcceptanceConfig, metrics: Metrics, arm: Arm) -> str:
    base, controls = config.baseline, config.controls
    header = ["context", "prompts", f"{base.name} acceptance", f"{arm.name} acceptance, points"]
    header += CHANGES.values()
    if controls:
        header.append(f"A/A ({controls[0].name}), points")
    rows = []
    for length in _lengths(config):
        cells = [
            length if isinstance(length, str) else format_tokens(length),
            str(metrics.get("acceptance", base.name, length).clusters),
            percent(metrics.get("acceptance", base.name, length).scaled(100)),
            signed(metrics.get("acceptance_difference", arm.name, length)),
            signed(metrics.get("acceptance_change", arm.name, length), " %"),
        ]
        cells.append(signed(metrics.get("tokens_per_step_change", arm.name, length), " %", interval=False))
        for name in list(CHANGES)[2:]:
            speed = metrics.get(name, arm.name, length)
            shown = speed.clusters >= _LEAST_BATCHES
            cells.append(signed(speed, " %", interval=False) if shown else "-")
        if controls:
            cells.append(signed(metrics.get("acceptance_difference", controls[0].name, length)))
        rows.append(cells)
    return f"**{arm.name} against {base.name}**\n\n" + table(header, rows)


def _over_texts(config: AcceptanceConfig, metrics: Metrics) -> list[str]:
    """The acceptance of all lengths with intervals over texts, where there are enough of them."""
    base, others = config.baseline, config.all_arms[1:]
    level = metrics.get("acceptance_over_texts", base.name, ALL_LENGTHS)
    if not level.clusters:
        return []
    rows = [[base.name, percent(level.scaled(100)), "-", "-"]]
    for arm in others:
        acceptance, points, relative = (
            metrics.get(f"{name}_over_texts", arm.name, ALL_LENGTHS)
            for name in ("acceptance", "acceptance_difference", "acceptance_change")
        )
        cells = [arm.name, percent(acceptance.scaled(100)), signed(points), signed(relative, " %")]
        rows.append(cells)
    header = ["arm", "acceptance", f"against {base.name}, points", "relative"]
    return [
        "**Over texts, all lengths together**",
        f"Prompts of one text overlap, so intervals over prompts may be too narrow. These are over the "
        f"{level.clusters} texts:",
        table(header, rows),
    ]


def _by_drafts(config: AcceptanceConfig, metrics: Metrics) -> str:
    base, others = config.baseline.name, config.all_arms[1:]
    header = [
        "drafts",
        f"{base} tokens/step",
        f"{base} acceptance",
        *(f"{arm.name}, points" for arm in others),
    ]
    rows = []
    for drafts in range(1, config.num_draft_tokens + 1):
        emitted = metrics.get("tokens_per_step_of", base, ALL_LENGTHS, drafts)
        acceptance = metrics.get("acceptance_of", base, ALL_LENGTHS, drafts)
        cells = [str(drafts), f"{emitted.value:.2f}", percent(acceptance.scaled(100))]
        for arm in others:
            cells.append(signed(metrics.get("acceptance_of_difference", arm.name, ALL_LENGTHS, drafts)))
        rows.append(cells)
    return "**By number of drafts, all lengths together**\n\n" + table(header, rows)


def _by_text(config: AcceptanceConfig, metrics: Metrics) -> str:
    base, others = config.baseline, config.all_arms[1:]
    header = ["text", "prompts", f"{base.name} acceptance", *(f"{arm.name}, points" for arm in others)]
    rows = []
    for text in metrics.texts:
        acceptance = metrics.get("acceptance", base.name, ALL_LENGTHS, text=text)
        cells = [text, str(acceptance.clusters), percent(acceptance.scaled(100))]
        for arm in others:
            cells.append(signed(metrics.get("acceptance_difference", arm.name, ALL_LENGTHS, text=text)))
        rows.append(cells)
    return "**By text, all lengths together**\n\n" + table(header, rows)


def _notes(config: AcceptanceConfig) -> str:
    return (
        f"{config.rounds_per_prompt} {config.kind_of_rounds}, {config.num_draft_tokens} drafts each, from "
        f"every prompt, on {config.device}. {_intervals(config)} Differences are paired on the prompt. "
        f"Speeds are medians of paired quotients of batches of {config.batch_size}, without the first batch "
        f"of a length where there are others, and are left out of fewer than {_LEAST_BATCHES} batches; a "
        f"step drafts and verifies for the whole batch. Few batches are no evidence on speed: "
        f"`page4 throughput` measures it."
        + (
            ""
            if config.lengths_are_paired
            else " Longer contexts have fewer prompts: compare arms, not lengths."
        )
    )


def _intervals(config: AcceptanceConfig) -> str:
    if config.most_prompts < LEAST_CLUSTERS:
        return f"{TOO_FEW_PROMPTS.capitalize()}."
    return (
        f"In brackets: {100 * config.confidence:g} % bootstrap intervals over prompts, if there are at least "
        f"{LEAST_CLUSTERS}."
    )


def _check_line(name: str, by_arm: dict[str, dict[str, int]]) -> str:
    subject, unit = {
        "plain_greedy": ("Speculative against plain greedy output", "tokens"),
        "rerun": ("The same rounds run twice", "rounds"),
    }[name]
    found = (f"{arm}: {n['mismatches']} of {n['compared']} {unit} differ" for arm, n in by_arm.items())
    return f"{subject}: {'; '.join(found)}."


def _lengths(config: AcceptanceConfig) -> list[int | str]:
    return [*(config.lengths or ()), ALL_LENGTHS]
