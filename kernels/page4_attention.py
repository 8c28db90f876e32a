"""Grouped sparse attention over the 4-token blocks of a plan, read from a paged K/V cache."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor

from page4.kernels.block_select import BlockPlan
from page4.kernels.codecs import STORAGE_DTYPES, check_kv_format, check_scale, decode_kv
from page4.kernels.errors import InputError
from page4.kernels.qsa_prepare import BLOCKS_PER_PAGE, COMPRESS_RATIO, PAGE_TOKENS


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    plan: BlockPlan,
    kv_format: str,
    k_scale: float,
    v_scale: float,
) -> None:
    check_kv_format(kv_format)
    check_scale(k_scale, "k_scale")
    check_scale(v_scale, "v_scale")
    rows, query_heads, dim = q.shape
    if k_pages.shape != v_pages.shape or k_pages.ndim != 4 or k_pages.shape[2:] != (PAGE_TOKENS, dim):
        raise InputError(
            f"K and V pages must both be [P, Hkv, {PAGE_TOKENS}, {dim}], "
            f"got {list(k_pages.shape)} and {list(v_pages.shape)}"
        )
    if query_heads % k_pages.shape[1]:
        raise InputError(f"{query_heads} query heads are not a multiple of {k_pages.shape[1]} KV heads")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dtype != STORAGE_DTYPES[kv_format]:
            raise InputError(f"{name} in {kv_format} must be {STORAGE_DTYPES[kv_format]}, got {pages.dtype}")
    groups, _, rows_per_group, ratio = plan.token_mask.shape
    if ratio != COMPRESS_RATIO or groups != -(-rows // rows_per_group):
        raise InputError(f"the plan covers {groups} groups of {rows_per_group} rows; q has {rows} rows")
    if block_table.ndim != 1:
        raise InputError(f"block_table must be one request's int64 [n], got {list(block_table.shape)}")


def _gather_blocks(pages: Tensor, block_table: Tensor, blocks: Tensor, kv_format: str) -> Tensor:
    """Decoded values of the listed 4-token blocks, FP32 ``[Hkv, n, 4 * D]``; no other page is touched."""
    num_pages, heads, _, dim = pages.shape
    page = block_table[blocks // BLOCKS_PER_PAGE]
    if bool(((page < 0) | (page >= num_pages)).any()):
        raise InputError(f"the block table names a page outside 0..{num_pages - 1} for a block that is read")
    head = torch.arange(heads, device=pages.device)[:, None]
    index = (page * heads + head) * BLOCKS_PER_PAGE + blocks % BLOCKS_PER_PAGE  # [Hkv, n]
    rows = pages.reshape(-1, COMPRESS_RATIO * dim)  # one row is one block of one head
    return decode_kv(rows.index_select(0, index.flatten()), kv_format).view(heads, len(blocks), -1)


def page4_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    plan: BlockPlan,
    kv_format: str,
    k_scale: float,
    v_scale: float,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one request's rows over the tokens that its plan lets each row see.

    Formula, per row and query head (query head ``h`` reads KV head ``h // (Hq / Hkv)``)::

        s_t = softmax_scale * k_scale * (q . decode(K_t))          for visible tokens t
        lse = log sum_t exp(s_t)                                   natural logarithm
        out = v_scale * sum_t exp(s_t - lse) * decode(V_t)

    Shapes: ``q`` is ``[R, Hq, D]``, pages are ``[P, Hkv, 16, D]`` in the format's storage dtype,
    ``block_table`` is int64 ``[n]``, ``plan`` comes from :func:`~page4.kernels.block_select.union_plan` over
    the same rows. Returns ``out`` as ``[R, Hq, D]`` and ``lse`` as ``[R, Hq]``, both FP32 (FP64 for a float64
    ``q``). A row that sees no token gives 0 and ``-inf``.

    What is never read: pages that no listed block lies in, and block-table entries of such pages (they may be
    stale and out of range). What is read but never contributes: slots that no row of the group sees (they may
    hold NaN). A slot that some row of a group sees must hold a finite value for all of the group's rows.

    Raises:
        InputError: shapes or dtypes that disagree, scales that are not positive finite numbers, a plan that
            reaches past the block table, or a page that does not exist.
    """
    _check(q, k_pages, v_pages, block_table, plan, kv_format, k_scale, v_scale)
    rows, query_heads, dim = q.shape
    kv_heads = k_pages.shape[1]
    rows_per_group = plan.token_mask.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(rows, query_heads, dim, dtype=compute, device=q.device)
    lse = torch.full((rows, query_heads), -torch.inf, dtype=compute, device=q.device)

    needed = plan.blocks[plan.blocks >= 0].unique()  # ascending
    if len(needed) == 0:
        return out, lse
    if int(needed[-1]) >= len(block_table) * BLOCKS_PER_PAGE:
        raise InputError(
            f"the plan reads block {int(needed[-1])}; the block table has {len(block_table)} pages"
        )
    # Groups of a prefill share most blocks, so each block is decoded once for all of them.
    k_blocks = _gather_blocks(k_pages, block_table, needed, kv_format).to(compute)
    v_blocks = _gather_blocks(v_pages, block_table, needed, kv_format).to(compute)
    scaled_q = q.to(compute) * (softmax_scale * k_scale)
    entries = torch.searchsorted(needed, plan.blocks.clamp(min=0))  # [G, U] into k_blocks
    # Two workspaces serve all groups: touching fresh memory would cost more than the softmax.
    heads_per_kv = query_heads // kv_heads
    size = query_heads * min(rows, rows_per_group) * plan.blocks.shape[1] * COMPRESS_RATIO
    score_space, weight_space = (torch.empty(size, dtype=compute, device=q.device) for _ in range(2))

    for group, count in enumerate(plan.counts.tolist()):
        if count == 0:
            continue
        first, last = group * rows_per_group, min(rows, (group + 1) * rows_per_group)
        k = rearrange(k_blocks[:, entries[group, :count]], "h u (r d) -> h (u r) d", r=COMPRESS_RATIO)
        v = rearrange(v_blocks[:, entries[group, :count]], "h u (r d) -> h (u r) d", r=COMPRESS_RATIO)
        hidden = ~rearrange(plan.token_mask[group, :count, : last - first], "u m r -> m (u r)")  # [m, N]
        # Neither a probability of 0 nor a score of -inf hides a NaN in an unseen slot, so K and V become 0.
        unseen = hidden.all(dim=0)
        k[:, unseen], v[:, unseen] = 0.0, 0.0  # [Hkv, N, D]

        group_q = rearrange(scaled_q[first:last], "m (h g) d -> h (g m) d", h=kv_heads)
        shape = (kv_heads, heads_per_kv * (last - first), k.shape[1])
        scores = score_space[: math.prod(shape)].view(shape)
        weights = weight_space[: math.prod(shape)].view(shape)
        torch.bmm(group_q, k.mT, out=scores)
        per_row = scores.view(kv_heads, heads_per_kv, last - first, -1)  # [Hkv, g, m, N]
        per_row += per_row.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        torch.softmax(scores, dim=-1, out=weights)
        # The largest probability is exp(max - lse).
        group_lse = scores.amax(dim=-1) - weights.amax(dim=-1).log()  # [Hkv, g * m]
        group_out = torch.bmm(weights, v) * v_scale  # [Hkv, g * m, D]
        live = ~hidden.all(dim=1)  # a row without tokens keeps 0 and -inf
        out[first:last][live] = rearrange(group_out, "h (g m) d -> m (h g) d", m=last - first)[live]
        lse[first:last][live] = rearrange(group_lse, "h (g m) -> m (h g)", m=last - first)[live]
    return out, lse
