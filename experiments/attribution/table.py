"""The tables of the study: a question each, and a row per arm."""

from __future__ import annotations

from collections.abc import Sequence

from page4.experiments.acceptance.config import AcceptanceConfig
from page4.experiments.acceptance.metrics import ALL_LENGTHS, Metrics
from page4.experiments.attribution.arms import HEADINGS, Condition
from page4.experiments.attribution.summary import FREE_BOUND, FREE_LOSS, LEAST_ROUNDS, TREATED, costs_nothing
from page4.experiments.markdown import percent, signed, table
from page4.experiments.plots import format_tokens
from page4.experiments.statistics import LEAST_CLUSTERS


def markdown(measured: AcceptanceConfig, conditions: Sequence[Condition], metrics: Metrics) -> str:
    """All tables, the questions in the order of their headings."""
    parts = []
    for group, heading in HEADINGS.items():
        members = [condition for condition in conditions if condition.group == group]
        if members:
            parts.append(f"**{heading}**\n\n" + _group(measured, members, metrics))
    if any(condition.group == "formats" for condition in conditions):
        parts.append("**Formats that cost nothing**\n\n" + _verdicts(measured, conditions, metrics))
    return "\n\n".join([*parts, _notes(measured)]) + "\n"


def _group(measured: AcceptanceConfig, members: Sequence[Condition], metrics: Metrics) -> str:
    against = members[0].group in TREATED
    lengths = _lengths(measured)
    header = ["arm", "what", *(f"{_name(length)}, points" for length in lengths), "rounds changed"]
    header.append("more than with the format, points")
    if against:
        header.append("against the format, points")
    rows = []
    for condition in members:
        arm = condition.arm.name
        if condition.arm == measured.baseline:
            values = [percent(metrics.get("acceptance", arm, length).scaled(100)) for length in lengths]
            rows.append([arm, condition.says, *values, "-", "-"])
            continue
        cells = [signed(metrics.get("acceptance_difference", arm, length)) for length in lengths]
        cells.append(percent(metrics.get("changed_rounds", arm, ALL_LENGTHS)))
        cells.append(signed(metrics.get("changed_rounds_to_format", arm, ALL_LENGTHS)))
        if against:
            cells.append(signed(metrics.get("difference_to_format", arm, ALL_LENGTHS)))
        rows.append([arm, condition.says, *cells])
    return table(header, rows)


def _verdicts(measured: AcceptanceConfig, conditions: Sequence[Condition], metrics: Metrics) -> str:
    lengths = _lengths(measured)
    header = ["arm", *(f"{_name(length)}, relative" for length in lengths), "costs nothing"]
    words = {True: "yes", False: "no", None: "too few rounds"}
    rows = []
    for condition in [conditions[2], *(c for c in conditions if c.group == "formats")]:
        arm = condition.arm.name
        changes = [signed(metrics.get("acceptance_change", arm, length), " %") for length in lengths]
        rows.append([arm, *changes, words[costs_nothing(measured, metrics, arm)]])
    return table(header, rows)


def _notes(measured: AcceptanceConfig) -> str:
    prompts = measured.prompts_at((measured.lengths or (1,))[0])
    base, coverage = measured.baseline.name, 100 * measured.confidence
    return (
        f"{measured.rounds_per_prompt} greedy rounds of {measured.num_draft_tokens} drafts from each of "
        f"{prompts} prompts, on {measured.device}, reference layers. Differences are to {base} on the same "
        f"prompts. In brackets: {coverage:g} % bootstrap intervals over prompts, if there are at least "
        f"{LEAST_CLUSTERS}. A format costs nothing if at every length its acceptance is within "
        f"{-FREE_LOSS:g} % of {base}'s and the interval excludes {FREE_BOUND:g} %; fewer than "
        f"{LEAST_ROUNDS} rounds per length cannot tell."
    )


def _lengths(measured: AcceptanceConfig) -> list[int | str]:
    return [*(measured.lengths or ()), ALL_LENGTHS]


def _name(length: int | str) -> str:
    return length if isinstance(length, str) else format_tokens(length)
