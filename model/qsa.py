"""QSA: sparse attention over 4-token blocks that a small indexer selects."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from page4.kernels.block_select import index_scores, select_blocks, union_plan
from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred
from page4.kernels.page4_attention import page4_attention_reference
from page4.kernels.qsa_prepare import update_index_keys, write_kv_pages
from page4.kvcache.cache import QSALayerCache, RequestPages

from .config import Qwen4ExpConfig
from .rows import RowBatch
from .weights import Weight, projection

# Adjacent prompt rows that share one list of blocks. Larger groups read fewer pages twice but compute more
# masked products; a decode step always forms one group per request.
PREFILL_ROWS_PER_GROUP = 64

# Index scores held at once: near a CPU's caches, or enough to fill a GPU.
_SCORE_ELEMENTS = {"cpu": 2**23, "cuda": 2**29}


class Indexer(nn.Module):
    """Scores complete blocks for a query: ``(1 / sqrt(Di)) sum_h relu(iq_h . K_b)``.

    A block's key is the FP32 mean of its raw keys, normalised and rotated at the block's first position.
    """

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.indexer_n_heads, config.indexer_head_dim
        self.ratio, self.block_topk = config.indexer_compress_ratio, config.block_topk
        self.rotary_dim, self.rope_theta = config.rotary_dim, config.rope_theta
        self.eps = config.rms_norm_eps
        self.index_qk_proj = projection((self.heads + 1) * self.head_dim, config.hidden_size)
        self.q_layernorm = Weight(self.head_dim)
        self.k_layernorm = Weight(self.head_dim)

    def query(self, projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normalised, rotated index queries ``[N, Hi, Di]`` from projections ``[N, (Hi+1) Di]``."""
        q = projected[..., : self.heads * self.head_dim].unflatten(-1, (self.heads, self.head_dim))
        return apply_rope(rms_norm_zero_centred(q, self.q_layernorm.weight, self.eps), cos, sin)

    def raw_key(self, projected: Tensor) -> Tensor:
        """Raw index keys ``[N, Di]``: neither normalised nor rotated, as the cache keeps them."""
        return projected[..., self.heads * self.head_dim :]


class QSAttention(nn.Module):
    """Grouped-query attention over the selected blocks and the incomplete tail, with a sigmoid output gate.

    ``q_proj`` rows are, per head, the query then the gate. q and k pass a zero-centred norm per head and a
    partial rotary embedding. Source: Qwen4Exp reference implementation (transformers).
    """

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.softmax_scale = config.head_dim**-0.5
        hidden = config.hidden_size
        self.q_proj = projection(2 * self.heads * self.head_dim, hidden)
        self.k_proj = projection(self.kv_heads * self.head_dim, hidden)
        self.v_proj = projection(self.kv_heads * self.head_dim, hidden)
        self.o_proj = projection(hidden, self.heads * self.head_dim, gain=0.1)
        self.q_norm = Weight(self.head_dim)
        self.k_norm = Weight(self.head_dim)
        self.indexer = Indexer(config)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query ``[N, Hq, D]``, key, value ``[N, Hkv, D]`` and output gate ``[N, Hq*D]`` of ``[N, H]``."""
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        q = apply_rope(rms_norm_zero_centred(q, self.q_norm.weight, self.eps), cos, sin)
        k = apply_rope(rms_norm_zero_centred(k, self.k_norm.weight, self.eps), cos, sin)
        return q, k, v, gate.flatten(-2)

    def finish(self, attended: Tensor, gate: Tensor) -> Tensor:
        """Gate and output projection: ``[N, Hq, D], [N, Hq*D] -> [N, H]``; the gate is applied in FP32."""
        gated = attended.flatten(-2).float() * torch.sigmoid(gate.float())
        return self.o_proj(gated.to(gate.dtype))

    def forward(self, x: Tensor, batch: RowBatch, cos: Tensor, sin: Tensor, cache: QSALayerCache) -> Tensor:
        """Rows of a step ``[N, H] -> [N, H]``: writes their K, V and index keys, then attends."""
        q, k, v, gate = self.project(x, cos, sin)
        projected = self.indexer.index_qk_proj(x)
        index_q = self.indexer.query(projected, cos, sin)
        raw_keys = self.indexer.raw_key(projected)
        attended = torch.empty(q.shape, dtype=torch.float32, device=x.device)
        for group in batch.groups:
            pages = cache.pages(group.requests, group.longest)
            positions = group.rows_of(batch.positions)
            self._write(group.rows_of(k), group.rows_of(v), positions, cache, pages)
            self._write_index(group.rows_of(raw_keys), positions, group.requests, cache, pages)
            queries, index_queries = group.rows_of(q), group.rows_of(index_q)
            rows_per_group = group.length if group.decode else PREFILL_ROWS_PER_GROUP
            # As many requests at once as memory allows.
            scores = group.length * max(1, group.longest // self.indexer.ratio)
            at_once = max(1, _SCORE_ELEMENTS.get(x.device.type, _SCORE_ELEMENTS["cpu"]) // scores)
            parts = []
            for first in range(0, len(queries), at_once):
                some = slice(first, first + at_once)
                tables = pages.tables[some]
                parts.append(
                    self._attend(
                        queries[some], index_queries[some], positions[some], tables, rows_per_group, cache
                    )
                )
            group.put_rows(attended, torch.cat(parts))
        return self.finish(attended, gate)

    def _write(
        self, k: Tensor, v: Tensor, positions: Tensor, cache: QSALayerCache, pages: RequestPages
    ) -> None:
        slots = pages.slots(positions).flatten()
        write_kv_pages(k.flatten(0, 1), cache.k_pages, slots, cache.format.name, cache.k_scale)
        write_kv_pages(v.flatten(0, 1), cache.v_pages, slots, cache.format.name, cache.v_scale)

    def _write_index(
        self, raw: Tensor, positions: Tensor, requests: Tensor, cache: QSALayerCache, pages: RequestPages
    ) -> None:
        update_index_keys(
            raw,
            positions,
            cache.ring,
            requests,
            cache.compressed_pages,
            pages.tables,
            self.indexer.k_layernorm.weight,
            self.indexer.rotary_dim,
            self.indexer.rope_theta,
            self.eps,
        )

    def _attend(
        self,
        q: Tensor,
        index_q: Tensor,
        positions: Tensor,
        tables: Tensor,
        rows_per_group: int,
        cache: QSALayerCache,
    ) -> Tensor:
        """Attention of ``[B, T]`` rows, ``[B, T, Hq, D]``."""
        ratio = self.indexer.ratio
        # A shorter request's missing pages read as page 0: blocks a row does not see are never chosen.
        compressed = rearrange(
            cache.compressed_pages[tables.clamp_min(0)], "b page block dim -> b (page block) dim"
        )
        scores = index_scores(index_q, compressed).flatten(0, 1)
        flat_positions = positions.flatten()
        visible = (flat_positions + 1) // ratio  # complete blocks each row may choose from
        selected = select_blocks(scores, visible, self.indexer.block_topk)
        plan = union_plan(selected, flat_positions, rows_per_group, ratio, requests=len(positions))
        out, _ = page4_attention_reference(
            q.flatten(0, 1),
            cache.k_pages,
            cache.v_pages,
            tables,
            plan,
            cache.format.name,
            cache.k_scale,
            cache.v_scale,
            self.softmax_scale,
        )
        return out.view(q.shape)
