"""QSA: sparse attention over 4-token blocks that a small indexer selects."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from page4.kernels.backend import Backend
from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred
from page4.kvcache.cache import QSALayerCache

from .config import Qwen4ExpConfig
from .qsa_reference import attend_reference
from .step import Step
from .weights import Weight, projection


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
        self.backend: Backend = "reference"
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

    def forward(self, x: Tensor, step: Step, cache: QSALayerCache) -> Tensor:
        """Rows of a step ``[N, H] -> [N, H]``: writes their K, V and index keys, then attends."""
        if self.backend == "triton":
            from .qsa_triton import attend_triton  # see Step.kernels

            return self.o_proj(attend_triton(self, x, step, cache).flatten(1))
        return attend_reference(self, x, step, cache)
