"""Distributions in float64 by their definitions, and how far samples may be from them."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor

from page4.kernels.draft_sampling import DraftDistributions, sample_drafts_reference
from page4.kernels.mtp_verify import verify_reference
from page4.kernels.sampling_params import SamplingParams

FALSE_ALARM = 1e-9  # of one check of correct code


def probabilities(
    logits: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    allowed: list[int] | None = None,
) -> Tensor:
    """float64 distribution of one row ``[V]``, token by token in the order of the logits."""
    values = logits.double().tolist()
    tokens = [t for t in range(len(values)) if allowed is None or t in allowed]
    tokens = sorted((t for t in tokens if values[t] > -math.inf), key=lambda t: (-values[t], t))
    weight = {t: math.exp((values[t] - values[tokens[0]]) / temperature) for t in tokens}
    tokens = [t for t in tokens if weight[t] >= min_p * (1 - 1e-6)]
    tokens = tokens[: top_k or None]
    total, reached, kept = sum(weight[t] for t in tokens), 0.0, []
    for t in tokens:
        if top_p < 1 and reached >= top_p * total:
            break
        kept.append(t)
        reached += weight[t]
    result = torch.zeros(len(values), dtype=torch.float64)
    for t in kept:
        result[t] = weight[t] / reached
    return result


def follows(tokens: Tensor, expected: Tensor) -> bool:
    """Whether int64 samples may come from a distribution ``[V]``, by chi-square and total variation.

    Both bounds are passed by correct samples with a probability of at least 1 - 1e-9. The mean of the total
    variation is at most ``sum sqrt(p (1 - p) / n) / 2``, and McDiarmid's inequality bounds what exceeds it.
    """
    n = tokens.numel()
    counts = tokens.bincount(minlength=len(expected)).double()
    possible = expected > 0
    if len(counts) > len(expected) or counts[~possible].any():
        return False
    p, counts = expected[possible], counts[possible]
    distance = float((counts / n - p).abs().sum() / 2)
    mean = float((p * (1 - p) / n).sqrt().sum() / 2)
    near = distance <= mean + math.sqrt(math.log(1 / FALSE_ALARM) / (2 * n))
    often = p * n >= 10  # the others are one class
    p = torch.cat([p[often], p[~often].sum()[None]])
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    if p[-1] * n < 10:
        p, counts = p[:-1], counts[:-1]
    if len(p) < 2:
        return near
    statistic = float(((counts - n * p) ** 2 / (n * p)).sum())
    return near and float(stats.chi2.sf(statistic, len(p) - 1)) >= FALSE_ALARM


def draw_step(
    target: Tensor,
    draft: Tensor,
    params: SamplingParams,
    positions: Tensor,
    distributions: DraftDistributions | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of every request over the same rows: target ``[K + 1, V]``, draft ``[K, V]``."""
    requests, num_drafts = len(positions), draft.shape[0]
    if distributions is None:
        distributions = DraftDistributions.empty(target[:1].expand(requests, -1), num_drafts)
    drafts = torch.empty(requests, num_drafts, dtype=torch.int64)
    for j in range(num_drafts):
        rows = draft[j].expand(requests, -1)
        drafts[:, j] = sample_drafts_reference(rows, positions + j, params, distributions, j)
    return verify_reference(
        target.expand(requests, -1, -1), drafts, positions, params, distributions, allowed
    )
