"""The sparse layer on the reference kernels, for any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from page4.kernels.block_select import index_scores, select_blocks, union_plan
from page4.kernels.norm_rope import rotary_cos_sin
from page4.kernels.page4_attention import page4_attention_reference
from page4.kernels.qsa_prepare import update_index_keys, write_kv_pages
from page4.kvcache.cache import QSALayerCache
from page4.kvcache.pages import RequestPages

from .step import Step

if TYPE_CHECKING:
    from .qsa import QSAttention

# Adjacent prompt rows that share one list of blocks. Larger groups read fewer pages twice but compute more
# masked products; a decode step always forms one group per request.
PREFILL_ROWS_PER_GROUP = 32

# Index scores held at once: near a CPU's caches, or enough to fill a GPU.
_SCORE_ELEMENTS = {"cpu": 2**23, "cuda": 2**29}


def attend_reference(layer: QSAttention, x: Tensor, step: Step, cache: QSALayerCache) -> Tensor:
    """Rows of a step ``[N, H] -> [N, H]``: writes their K, V and index keys, then attends."""
    batch, (cos, sin) = step.batch, step.rotary
    q, k, v, gate = layer.project(x, cos, sin)
    q, (k, v) = cache.intervention.queries(q), cache.intervention.stored(k, v)
    projected = layer.indexer.index_qk_proj(x)
    index_q = layer.indexer.query(projected, cos, sin)
    raw_keys = layer.indexer.raw_key(projected)
    attended = torch.empty(q.shape, dtype=torch.float32, device=x.device)
    for group in batch.groups:
        pages = cache.pages(group.requests, group.longest)
        positions = group.rows_of(batch.positions)
        _write(group.rows_of(k), group.rows_of(v), positions, cache, pages)
        update_index_keys(
            group.rows_of(raw_keys),
            positions,
            cache.ring,
            group.requests,
            cache.compressed_pages,
            pages.tables,
            layer.indexer.k_layernorm.weight,
            layer.indexer.rotary_dim,
            layer.indexer.rope_theta,
            layer.eps,
        )
        queries, index_queries = group.rows_of(q), group.rows_of(index_q)
        rows_per_group = group.length if group.decode else PREFILL_ROWS_PER_GROUP
        # As many requests at once as memory allows.
        scores = group.length * max(1, group.longest // layer.indexer.ratio)
        at_once = max(1, _SCORE_ELEMENTS.get(x.device.type, _SCORE_ELEMENTS["cpu"]) // scores)
        parts = []
        for first in range(0, len(queries), at_once):
            some = slice(first, first + at_once)
            tables = pages.tables[some]
            parts.append(
                _attend(
                    layer, queries[some], index_queries[some], positions[some], tables, rows_per_group, cache
                )
            )
        group.put_rows(attended, torch.cat(parts))
    return layer.finish(cache.intervention.attended(attended), gate)


def selected_blocks(
    layer: QSAttention, x: Tensor, positions: Tensor, request: int, cache: QSALayerCache
) -> Tensor:
    """Blocks that rows of one request choose among the index keys in the cache, bool ``[N, blocks]``.

    For observation: nothing is written. The rows ``x [N, H]`` at ``positions``, int64 ``[N]``, must have been
    run, so that every block they see is complete; their incomplete tails are no part of a choice.
    """
    indexer = layer.indexer
    projected = indexer.index_qk_proj(x)
    cos, sin = rotary_cos_sin(positions, indexer.rotary_dim, indexer.rope_theta)
    pages = cache.pages(torch.tensor([request], device=x.device), int(positions.max()) + 1)
    index_q = indexer.query(projected, cos, sin)
    return _select(layer, index_q[None], positions[None], pages.tables, cache)


def _write(k: Tensor, v: Tensor, positions: Tensor, cache: QSALayerCache, pages: RequestPages) -> None:
    slots = pages.slots(positions).flatten()
    name = cache.format.name
    write_kv_pages(k.flatten(0, 1), cache.k_pages, slots, name, cache.k_scale, cache.k_token_scales)
    write_kv_pages(v.flatten(0, 1), cache.v_pages, slots, name, cache.v_scale, cache.v_token_scales)


def _select(
    layer: QSAttention, index_q: Tensor, positions: Tensor, tables: Tensor, cache: QSALayerCache
) -> Tensor:
    """Blocks that ``[B, T]`` rows choose, bool ``[B * T, blocks]``."""
    # A shorter request's missing pages read as page 0: blocks a row does not see are never chosen.
    compressed = rearrange(
        cache.compressed_pages[tables.clamp_min(0)], "b page block dim -> b (page block) dim"
    )
    scores = index_scores(index_q, compressed).flatten(0, 1)
    visible = (positions.flatten() + 1) // layer.indexer.ratio  # complete blocks each row may choose from
    return select_blocks(scores, visible, layer.indexer.block_topk)


def _attend(
    layer: QSAttention,
    q: Tensor,
    index_q: Tensor,
    positions: Tensor,
    tables: Tensor,
    rows_per_group: int,
    cache: QSALayerCache,
) -> Tensor:
    """Attention of ``[B, T]`` rows, ``[B, T, Hq, D]``."""
    selected = cache.intervention.chosen(_select(layer, index_q, positions, tables, cache))
    flat_positions = positions.flatten()
    plan = union_plan(selected, flat_positions, rows_per_group, layer.indexer.ratio, requests=len(positions))
    out, _ = page4_attention_reference(
        q.flatten(0, 1),
        cache.k_pages,
        cache.v_pages,
        tables,
        plan,
        cache.format.name,
        cache.k_scale,
        cache.v_scale,
        layer.softmax_scale,
        cache.k_token_scales,
        cache.v_token_scales,
    )
    return out.view(q.shape)
