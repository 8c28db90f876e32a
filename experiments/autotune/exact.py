"""Grouped attention over a packed plan in float64: what every configuration must give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.codecs import decode_kv
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.qsa_prepare import PAGE_TOKENS

_MOST_GROUPS = 64  # groups that are computed; more are sampled evenly


@dataclass(frozen=True)
class ExactRows:
    """Float64 results of some rows of a call.

    Attributes:
        rows: int64 ``[n]``, which rows.
        out: ``[n, Hq, D]``.
        lse: ``[n, Hq]``, natural logarithm.
        magnitude: ``[n, Hq, D]``, like ``out`` but with ``|V|``: what an error is proportional to.
    """

    rows: Tensor
    out: Tensor
    lse: Tensor
    magnitude: Tensor

    def difference(self, out: Tensor, lse: Tensor) -> str | None:
        """What is wrong with a result ``[N, Hq, D]`` and ``[N, Hq]``, in words; None if it is right.

        Right is: within three FP16 roundings of ``magnitude`` (probabilities, scaled int8 values, output) and
        FP32 arithmetic for the rest. NaN is wrong.
        """
        roundings = 0 if out.dtype == torch.float32 else 3
        bound = (roundings * 2.0**-11 + 1e-5) * self.magnitude
        error = (out[self.rows].double() - self.out).abs()
        if not bool((error <= bound).all()):
            worst = float((error / bound.clamp(min=1e-30)).nan_to_num(math.inf).max())
            return f"the output is off by {worst:.3g} times the allowed error"
        if not torch.allclose(lse[self.rows].double(), self.lse, rtol=1e-5, atol=2e-5):
            return "the LSE differs"
        return None


def exact_rows(inputs: AttentionInputs) -> ExactRows:
    """Rows of up to 64 groups, computed group by group in float64. Synchronises with the device."""
    plan = inputs.plan
    live = (plan.group_rows > 0).nonzero().flatten()
    step = max(1, -(-len(live) // _MOST_GROUPS))
    parts = [_group(inputs, int(group)) for group in live[::step].tolist()]
    rows, out, lse, magnitude = (torch.cat(values) for values in zip(*parts, strict=True))
    return ExactRows(rows, out, lse, magnitude)


def _group(inputs: AttentionInputs, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan, q = inputs.plan, inputs.q
    count, size = int(plan.counts[group]), int(plan.group_rows[group])
    start, request = int(plan.group_start[group]), int(plan.group_request[group])
    rows = torch.arange(start, start + size, device=q.device)
    blocks = plan.blocks[group, :count].long()
    token = torch.arange(BLOCK_TOKENS, device=q.device)
    words = plan.masks[group, :count, None, None] >> (
        4 * torch.arange(size, device=q.device)[:, None] + token
    )
    sees = ((words & 1) != 0).transpose(0, 1).flatten(1)  # [M, U * 4]
    seen = sees.any(dim=0)
    sees = sees[:, seen]
    page = inputs.block_tables[request][blocks // (PAGE_TOKENS // BLOCK_TOKENS)]
    page = page[:, None].expand(-1, BLOCK_TOKENS).flatten()[seen]
    slot = (blocks[:, None] * BLOCK_TOKENS + token).flatten()[seen] % PAGE_TOKENS
    k = _values(inputs.k_pages, inputs.k_token_scales, inputs.k_scale, inputs.kv_format, page, slot)
    v = _values(inputs.v_pages, inputs.v_token_scales, inputs.v_scale, inputs.kv_format, page, slot)

    grouped = q[rows].double().view(size, inputs.kv_heads, inputs.heads_per_kv, inputs.head_dim)
    scores = torch.einsum("mhgd,htd->mhgt", grouped, k) * inputs.softmax_scale
    scores = scores.masked_fill(~sees[:, None, None], -math.inf)
    lse = scores.logsumexp(dim=-1)  # [M, Hkv, group]
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    factor = 1.0 if inputs.gate is None else inputs.gate[rows].double().sigmoid()
    out, magnitude = (
        factor * torch.einsum("mhgt,htd->mhgd", weights, values).flatten(1, 2) for values in (v, v.abs())
    )
    return rows, out, lse.flatten(1), magnitude


def _values(
    pages: Tensor, token_scales: Tensor | None, scale: float, kv_format: str, page: Tensor, slot: Tensor
) -> Tensor:
    """Float64 ``[Hkv, T, D]`` of token slots."""
    values = decode_kv(pages[page, :, slot], kv_format).double() * scale  # [T, Hkv, D]
    if token_scales is not None:
        values = values * token_scales[page, :, slot].double()[..., None]
    return values.transpose(0, 1)
