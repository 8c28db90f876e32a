"""Grouped sparse attention over the blocks of a plan, read from a paged K/V cache."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from page4.kernels.block_select import BlockPlan
from page4.kernels.codecs import STORAGE_DTYPES, check_kv_format, check_scale, check_token_scales, decode_kv
from page4.kernels.errors import InputError
from page4.kernels.qsa_prepare import PAGE_TOKENS

# Scores computed at once: near a CPU's cache, or enough to fill a GPU. Never less than one group.
_SLAB_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    plan: BlockPlan,
    kv_format: str,
    k_scale: float,
    v_scale: float,
    k_token_scales: Tensor | None,
    v_token_scales: Tensor | None,
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
    for name, scales in (("k_token_scales", k_token_scales), ("v_token_scales", v_token_scales)):
        check_token_scales(scales, kv_format, k_pages.shape[:3], name)
    if block_tables.ndim != 2 or block_tables.shape[0] == 0 or rows % block_tables.shape[0]:
        raise InputError(
            f"block_tables must be int64 [B, n] with B a divisor of {rows} rows, "
            f"got {list(block_tables.shape)}"
        )
    requests = block_tables.shape[0]
    groups, _, rows_per_group, ratio = plan.token_mask.shape
    if PAGE_TOKENS % ratio or groups != requests * -(-(rows // requests) // rows_per_group):
        raise InputError(
            f"the plan covers {groups} groups of {rows_per_group} rows; "
            f"q has {rows} rows of {requests} requests"
        )


def _physical_blocks(plan: BlockPlan, block_tables: Tensor, num_pages: int) -> Tensor:
    """Where each listed block lies, ``page * per_page + block``, int64 ``[G, U]``; padding repeats one."""
    per_page = PAGE_TOKENS // plan.token_mask.shape[3]
    listed = plan.blocks >= 0
    blocks = plan.blocks.clamp(min=0)
    logical_page = blocks // per_page
    tables = block_tables.repeat_interleave(len(blocks) // len(block_tables), dim=0)  # [G, n]
    if bool((logical_page[listed] >= tables.shape[1]).any()):
        raise InputError(
            f"the plan reads block {int(plan.blocks.max())}; the block tables have {tables.shape[1]} pages"
        )
    page = tables.gather(1, logical_page)
    if bool(((page < 0) | (page >= num_pages))[listed].any()):
        raise InputError(f"a block table names a page outside 0..{num_pages - 1} for a block that is read")
    physical = page * per_page + blocks % per_page
    return torch.where(listed, physical, physical[listed][0])


def _decoded(
    pages: Tensor, token_scales: Tensor | None, physical: Tensor, ratio: int, kv_format: str
) -> Tensor:
    """Values of physical blocks ``[n]``, ``[Hkv, n, ratio * D]``; no other block is touched.

    Multiplied by the scales per token and head, where a format has them, and not by its static scale.
    """
    _, heads, _, dim = pages.shape
    per_page = PAGE_TOKENS // ratio
    head = torch.arange(heads, device=pages.device)[:, None]
    index = (physical // per_page * heads + head) * per_page + physical % per_page  # [Hkv, n]
    rows = pages.reshape(-1, ratio * dim)  # one row is one block of one head
    values = decode_kv(rows.index_select(0, index.flatten()), kv_format)
    if token_scales is not None:
        scales = token_scales.reshape(-1, ratio).index_select(0, index.flatten())  # [Hkv * n, ratio]
        values = (values.view(-1, ratio, dim) * scales[..., None]).flatten(1)
    return values.view(heads, len(physical), -1)


def page4_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    plan: BlockPlan,
    kv_format: str,
    k_scale: float,
    v_scale: float,
    softmax_scale: float,
    k_token_scales: Tensor | None = None,
    v_token_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of B requests' rows over the tokens that the plan lets each row see.

    Formula, per row and query head (query head ``h`` reads KV head ``h // (Hq / Hkv)``)::

        s_t = softmax_scale * k_scale * (q . decode(K_t))          for visible tokens t
        lse = log sum_t exp(s_t)                                   natural logarithm
        out = v_scale * sum_t exp(s_t - lse) * decode(V_t)

    Shapes: ``q`` is ``[R, Hq, D]`` with ``R / B`` rows of each request in turn, pages are ``[P, Hkv, 16, D]``
    in the format's storage dtype, ``block_tables`` is int64 ``[B, n]``, ``plan`` comes from
    :func:`~page4.kernels.block_select.union_plan` over the same rows and requests. ``k_token_scales`` and
    ``v_token_scales``, FP32 ``[P, Hkv, 16]``, belong to ``int8`` alone: ``decode`` includes them. Returns
    ``out`` as ``[R, Hq, D]`` and ``lse`` as ``[R, Hq]``, both FP32 (FP64 for a float64 ``q``). A row that
    sees no token gives 0 and ``-inf``. Inference only: nothing here is differentiable.

    What is never read: pages that no listed block lies in, and block-table entries of such pages (they may be
    stale and out of range). What is read but never contributes: slots that no row of the group sees (they may
    hold NaN). A slot that some row of a group sees must hold a finite value for all of the group's rows.

    Raises:
        InputError: shapes or dtypes that disagree, scales that are not positive finite numbers, a plan that
            reaches past a block table, or a page that does not exist.
    """
    _check(
        q, k_pages, v_pages, block_tables, plan, kv_format, k_scale, v_scale, k_token_scales, v_token_scales
    )
    rows, query_heads, dim = q.shape
    kv_heads, requests = k_pages.shape[1], block_tables.shape[0]
    groups, longest, rows_per_group, ratio = plan.token_mask.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    # Rows in groups; the last group of a request may be short.
    per_request = rows // requests
    padding = -per_request % rows_per_group
    grouped_q = pad(q.to(compute).view(requests, per_request, -1), (0, 0, 0, padding))
    grouped_q = grouped_q.view(groups, rows_per_group, query_heads, dim) * (softmax_scale * k_scale)
    out = torch.zeros_like(grouped_q)
    lse = torch.full(out.shape[:3], -torch.inf, dtype=compute, device=q.device)

    counts = plan.counts.tolist()
    if not any(counts):
        return out[:0].new_zeros(q.shape), lse[:0].new_full(q.shape[:2], -torch.inf)
    # Groups of a prefill share most blocks, so each block is decoded once for all of them.
    physical = _physical_blocks(plan, block_tables, k_pages.shape[0])
    needed, entries = physical.unique(return_inverse=True)
    k_blocks = _decoded(k_pages, k_token_scales, needed, ratio, kv_format).to(compute)
    v_blocks = _decoded(v_pages, v_token_scales, needed, ratio, kv_format).to(compute)

    # Two workspaces serve all slabs: touching fresh memory would cost more than the softmax.
    group_elements = max(1, query_heads * rows_per_group * longest * ratio)
    limit = _SLAB_ELEMENTS.get(q.device.type, _SLAB_ELEMENTS["cpu"])
    slab_groups = min(groups, max(1, limit // group_elements))
    spaces = [torch.empty(slab_groups * group_elements, dtype=compute, device=q.device) for _ in range(2)]
    for first in range(0, groups, slab_groups):
        slab = slice(first, min(first + slab_groups, groups))
        widest = max(counts[slab])
        if widest == 0:
            continue
        listed = entries[slab, :widest]
        k, v = (
            rearrange(blocks[:, listed], "h g u (r d) -> h g (u r) d", r=ratio)
            for blocks in (k_blocks, v_blocks)
        )
        hidden = ~rearrange(plan.token_mask[slab, :widest], "g u m r -> g m (u r)")  # [g, M, N]
        # Neither a probability of 0 nor a score of -inf hides a NaN in an unseen slot, so K and V become 0.
        unseen = hidden.all(dim=1)[None, :, :, None]
        k, v = (
            k.masked_fill_(unseen, 0.0).flatten(0, 1),
            v.masked_fill_(unseen, 0.0).flatten(0, 1),
        )  # [Hkv * g, N, D]

        slab_q = rearrange(grouped_q[slab], "g m (h n) d -> (h g) (n m) d", h=kv_heads)
        shape = (*slab_q.shape[:2], k.shape[1])
        scores, weights = (space[: math.prod(shape)].view(shape) for space in spaces)
        torch.bmm(slab_q, k.mT, out=scores)
        per_row = scores.view(kv_heads, hidden.shape[0], -1, rows_per_group, k.shape[1])  # [Hkv, g, n, M, N]
        per_row += scores.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf).unsqueeze(1)
        torch.softmax(scores, dim=-1, out=weights)
        # The largest probability is exp(max - lse).
        slab_lse = scores.amax(dim=-1) - weights.amax(dim=-1).log()  # [Hkv * g, n * M]
        slab_out = torch.bmm(weights, v) * v_scale  # [Hkv * g, n * M, D]
        live = ~hidden.all(dim=2)  # [g, M]; a row without tokens keeps 0 and -inf
        slab_out = rearrange(slab_out, "(h g) (n m) d -> g m (h n) d", h=kv_heads, m=rows_per_group)
        slab_lse = rearrange(slab_lse, "(h g) (n m) -> g m (h n)", h=kv_heads, m=rows_per_group)
        out[slab] = torch.where(live[..., None, None], slab_out, out[slab])
        lse[slab] = torch.where(live[..., None], slab_lse, lse[slab])
    return (
        out.view(requests, -1, query_heads, dim)[:, :per_request].reshape(rows, query_heads, dim),
        lse.view(requests, -1, query_heads)[:, :per_request].reshape(rows, query_heads),
    )
