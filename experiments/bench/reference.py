"""What float64 says of grouped attention, group by group, and how far a kernel may be from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.codecs import decode_kv
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.qsa_prepare import PAGE_TOKENS

TINY = 1e-12  # keeps a bound from being 0


@dataclass(frozen=True)
class Check:
    """A comparison with float64.

    Attributes:
        error: the largest error as a share of what is permitted; infinite for NaN.
        checked: groups of rows that were compared.
        groups: groups that there are.
    """

    error: float
    checked: int
    groups: int

    @property
    def passed(self) -> bool:
        """Whether the error is within what is permitted."""
        return self.error <= 1


def worst(actual: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Largest error over its bound; infinite where a NaN is."""
    if actual.numel() == 0:
        return 0.0
    share = (actual.double() - expected).abs() / (bound + TINY)
    return float(share.nan_to_num(torch.inf).max())


def sample_groups(groups: int, count: int, seed: int) -> list[int]:
    """``count`` of the groups at random, ascending; all of them for ``count`` 0 or too large."""
    if count == 0 or count >= groups:
        return list(range(groups))
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(groups, generator=generator)[:count].sort().values.tolist()


@dataclass(frozen=True)
class GroupAttention:
    """Attention of one group's ``M`` rows in float64.

    Attributes:
        rows: the group's rows among those of the step.
        out: ``[M, Hq, D]``, gated.
        lse: ``[M, Hq]``, natural logarithm.
        magnitude: like ``out`` with absolute values of V: what errors of rounded factors are relative to.
        score_magnitude: ``[M, Hq]``, the largest ``sum_d |q_d k_d|`` of a visible token, scaled.
    """

    rows: slice
    out: Tensor
    lse: Tensor
    magnitude: Tensor
    score_magnitude: Tensor

    def error(self, out: Tensor, lse: Tensor | None, roundings: float, score_roundings: float = 0.0) -> float:
        """Largest error of ``out [N, Hq, D]`` and ``lse [N, Hq]`` as a share of what is permitted.

        Permitted are ``roundings`` relative errors of probabilities, values and output together, scores that
        are off by ``score_roundings`` of their magnitude, and FP32 arithmetic.
        """
        factor = roundings + 1e-5 + 2 * score_roundings * self.score_magnitude[..., None]
        largest = worst(out[self.rows], self.out, factor * self.magnitude)
        if lse is not None:
            largest = max(largest, worst(lse[self.rows], self.lse, 2e-5 + 1e-5 * self.lse.abs()))
        return largest


def attention_groups(
    inputs: AttentionInputs, groups: Sequence[int], q: Tensor | None = None, gate: Tensor | None = None
) -> list[GroupAttention]:
    """The chosen groups by the definition, on the stored bytes. ``q`` and ``gate`` replace those given."""
    return [
        _group(inputs, group, inputs.q if q is None else q, inputs.gate if gate is None else gate)
        for group in groups
    ]


def _group(inputs: AttentionInputs, group: int, q: Tensor, gate: Tensor | None) -> GroupAttention:
    plan = inputs.plan
    count, start, size = (int(x[group]) for x in (plan.counts, plan.group_start, plan.group_rows))
    rows = slice(start, start + size)
    device = q.device
    within = torch.arange(BLOCK_TOKENS, device=device)
    token = (plan.blocks[group, :count, None] * BLOCK_TOKENS + within).view(-1)
    bits = plan.masks[group, :count, None] >> torch.arange(BLOCK_TOKENS * size, device=device)  # [U, 4 M]
    sees = (bits & 1).bool().view(count, size, BLOCK_TOKENS).transpose(0, 1).reshape(size, -1)  # [M, L]
    # Tokens that no row sees may have no page.
    some = sees.any(dim=0)
    token, sees = token[some].long(), sees[:, some]
    page = inputs.block_tables[int(plan.group_request[group]), token // PAGE_TOKENS]

    def values(pages: Tensor, scales: Tensor | None, scale: float) -> Tensor:
        stored = decode_kv(pages[page, :, token % PAGE_TOKENS], inputs.kv_format).double() * scale
        if scales is not None:
            stored = stored * scales[page, :, token % PAGE_TOKENS].double()[..., None]
        return stored.repeat_interleave(inputs.heads_per_kv, dim=1)  # [L, Hq, D]

    k = values(inputs.k_pages, inputs.k_token_scales, inputs.k_scale)
    v = values(inputs.v_pages, inputs.v_token_scales, inputs.v_scale)
    wide = q[rows].double() * inputs.softmax_scale
    scores = torch.einsum("mhd,lhd->mhl", wide, k).masked_fill(~sees[:, None], -torch.inf)
    largest = torch.einsum("mhd,lhd->mhl", wide.abs(), k.abs()).masked_fill(~sees[:, None], 0.0).amax(dim=2)
    weights = scores.softmax(dim=2)
    factor = (
        torch.ones((), dtype=torch.float64, device=device) if gate is None else gate[rows].double().sigmoid()
    )
    out, magnitude = (factor * torch.einsum("mhl,lhd->mhd", weights, x) for x in (v, v.abs()))
    return GroupAttention(rows, out, scores.logsumexp(dim=2), magnitude, largest)
