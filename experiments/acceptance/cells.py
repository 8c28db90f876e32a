"""The measurements of a study, in the order in which they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from page4.experiments.acceptance.config import AcceptanceConfig, Arm


@dataclass(frozen=True)
class Cell:
    """What is measured and stored at once: an interrupt loses at most one.

    Attributes:
        kind: "rounds" from real-text prefixes, a free "generation", or the "check" of one.
        arm: The condition.
        length: Context length in tokens.
        batch: Number of the batch of prompts.
        prompts: Indices of the prompts in it.
        tokens: Tokens that pass through the model, the unit of the progress bar.
    """

    kind: Literal["rounds", "generation", "check"]
    arm: Arm
    length: int
    batch: int
    prompts: tuple[int, ...]
    tokens: int


def plan_cells(config: AcceptanceConfig) -> list[Cell]:
    """Every cell of a resolved configuration.

    Arms are next to each other, and each takes every place in the order in turn, so that a machine that slows
    down or warms up favours none.
    """
    assert config.lengths is not None and config.batch_size is not None
    assert config.generation_prompts is not None
    cells = []
    for turn, length in enumerate(config.lengths):
        count = config.prompts_at(length)
        starts = range(0, count, config.batch_size)
        for batch, start in enumerate(starts):
            prompts = tuple(range(start, min(start + config.batch_size, count)))
            tokens = len(prompts) * (length + config.rounds_span)
            for arm in _rotated(config.all_arms, turn + batch):
                cells.append(Cell("rounds", arm, length, batch, prompts, tokens))
        limit = config.generation_max_length or length
        for prompt in range(min(config.generation_prompts, count) if length <= limit else 0):
            tokens = length + config.generation_tokens
            for arm in _rotated(config.all_arms, turn + prompt):
                cells.append(Cell("generation", arm, length, prompt, (prompt,), tokens))
    shortest = config.lengths[0]
    for prompt in range(min(config.check_prompts, config.prompts_at(shortest))):
        tokens = 2 * (shortest + config.generation_tokens)
        cells += [Cell("check", arm, shortest, prompt, (prompt,), tokens) for arm in distinct_formats(config)]
    return cells


def distinct_formats(config: AcceptanceConfig) -> list[Arm]:
    """The first arm of every pair of formats."""
    first: dict[tuple[str, str], Arm] = {}
    for arm in config.all_arms:
        first.setdefault(arm.formats, arm)
    return list(first.values())


def _rotated(arms: tuple[Arm, ...], turn: int) -> tuple[Arm, ...]:
    first = turn % len(arms)
    return arms[first:] + arms[:first]
