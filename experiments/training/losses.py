"""Losses of a batch in the three training modes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.experiments.training import rows as row
from page4.experiments.training.config import Phase, TrainConfig
from page4.experiments.training.sequence import Pass, SequenceModel


@dataclass(frozen=True)
class Losses:
    """Scalars of one batch: text loss, one loss per draft, balance and index loss; absent ones are zero."""

    text: Tensor
    drafts: Tensor  # [K]
    balance: Tensor
    index: Tensor


@dataclass(frozen=True)
class Sampled:
    """Which rows of a batch train the later drafts, and which train the indexer."""

    roots: Tensor  # [n] sorted
    index_rows: Tensor | None


def sample_rows(
    length: int,
    batch: int,
    config: TrainConfig,
    joint: bool,
    generator: torch.Generator,
    device: torch.device,
) -> Sampled:
    """Random rows: ``chain_rows`` per batch for chains, and about 1024 rows of 2k context for the indexer."""
    roots = max(1, min(length - config.num_drafts - 1, config.chain_rows // batch))
    index = max(1, min(length, 1024 * 2048 // length) // batch)

    def pick(limit: int, count: int) -> Tensor:
        return torch.randperm(limit, device=device, generator=generator)[:count].sort().values

    return Sampled(
        pick(length - config.num_drafts - 1, roots), pick(length, min(index, length)) if joint else None
    )


def batch_losses(
    sequence: SequenceModel, window: Tensor, phase: Phase, config: TrainConfig, sampled: Sampled
) -> Losses:
    """Losses of ``window [B, T + K + 1]``; the tokens after T serve as targets only.

    Joint mode trains trunk and head; draft j (from 1) at row p predicts x_{p+1+j}, or the trunk's
    distribution of it. In draft modes the trunk is constant, and rows weigh more where the text is what the
    trunk would have chosen: a verified draft is always fed with such tokens.
    """
    ahead = config.num_drafts + 1
    batch, length = window.shape[0], window.shape[1] - ahead
    joint = phase.mode == "joint"
    learn = torch.is_grad_enabled()
    run = sequence.begin(window[:, :length], phase.sparse, sampled.index_rows)
    with torch.set_grad_enabled(learn and joint):
        hidden, streams = sequence.trunk(run)
    head = sequence.head
    zero = torch.zeros((), device=window.device)
    text = row.text_loss(hidden, head, window[:, 1 : length + 1].flatten()) if joint else zero
    teacher = hidden.detach().view(batch, length, -1)
    weights = _row_weights(teacher, head, window, length, joint, config)

    drafted, state, chain = sequence.first_draft(run, streams, window[:, 1 : length + 1])
    drafts = [_draft_loss(drafted, window, teacher, weights, None, 0, head, phase, config)]
    roots = sampled.roots
    state = state.view(batch, length, -1)[:, roots].flatten(0, 1)
    for step in range(1, config.num_drafts):
        tokens = window[:, roots + 1 + step].flatten()
        drafted, state = sequence.next_draft(run, state, tokens, roots, step, chain)
        drafts.append(_draft_loss(drafted, window, teacher, weights, roots, step, head, phase, config))
    return Losses(text, torch.stack(drafts), torch.stack(run.balance).mean(), _mean(run, zero))


def _mean(run: Pass, zero: Tensor) -> Tensor:
    return torch.stack(run.index).mean() if run.index else zero


@torch.no_grad()
def _row_weights(
    teacher: Tensor, head: Tensor, window: Tensor, length: int, joint: bool, config: TrainConfig
) -> Tensor:
    """``[K, B, T]``: 1 where x_{p+1} .. x_{p+1+j} are the trunk's own choices, else ``off_policy_weight``."""
    batch = teacher.shape[0]
    if joint:
        return torch.ones(config.num_drafts, batch, length, device=teacher.device)
    chosen = row.greedy_tokens(teacher.flatten(0, 1), head).view(batch, length)
    match = chosen == window[:, 1 : length + 1]
    levels, current = [], match
    for step in range(config.num_drafts):
        if step:
            # The row `step` further on; the last rows have none and keep the lower weight.
            ahead = torch.cat([match[:, step:], torch.zeros_like(match[:, :step])], 1)
            current = current & ahead
        levels.append(torch.where(current, 1.0, config.off_policy_weight))
    return torch.stack(levels)


def _draft_loss(
    drafted: Tensor,
    window: Tensor,
    teacher: Tensor,
    weights: Tensor,
    roots: Tensor | None,
    step: int,
    head: Tensor,
    phase: Phase,
    config: TrainConfig,
) -> Tensor:
    """Loss of draft ``step`` (from 0) at all rows, or at ``roots``."""
    length = teacher.shape[1]
    rows = torch.arange(length, device=teacher.device) if roots is None else roots
    if phase.mode == "joint" and phase.draft_target == "text":
        return row.text_loss(drafted, head, window[:, rows + 2 + step].flatten())
    # Row p's draft is the trunk's distribution at row p+1+step; the last rows have none.
    target = (rows + 1 + step).clamp_max(length - 1)
    weight = weights[step][:, rows] * (rows + 1 + step < length)
    hard = 0.0 if phase.mode == "joint" else config.hard_weight
    return row.trunk_loss(drafted, head, teacher[:, target].flatten(0, 1), weight.flatten(), hard)


def total_loss(losses: Losses, phase: Phase, config: TrainConfig) -> Tensor:
    """What a step minimises."""
    if phase.mode == "joint":
        return (
            losses.text
            + config.mtp_weight * losses.drafts.mean()
            + config.balance_weight * losses.balance
            + config.index_weight * losses.index
        )
    return losses.drafts.mean() + config.balance_weight * losses.balance
