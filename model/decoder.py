"""Decoder layers and the trunk that stacks them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from page4.kernels.norm_rope import rotary_cos_sin
from page4.kvcache.cache import HybridCache, LayerCache, QSALayerCache
from page4.kvcache.recurrent import ConvSlots, GatedDeltaSlots

from .config import LayerType, Qwen4ExpConfig
from .gated_delta_net import GatedDeltaNet
from .hyper_connection import HyperConnection
from .moe import MoE
from .ple import PerLayerEmbedding
from .qsa import QSAttention
from .rows import RowBatch
from .step import Step


class DecoderLayer(nn.Module):
    """``R += PLE(R)`` where present; then mixer and MoE, each between a read and a write of the streams.

    Args:
        ple_index: how many PLE layers come before this one, or None when it has none.
    """

    def __init__(self, config: Qwen4ExpConfig, kind: LayerType, ple_index: int | None = None) -> None:
        super().__init__()
        self.linear_attn = GatedDeltaNet(config) if kind == "linear_attention" else None
        self.self_attn = QSAttention(config) if kind == "qsa_attention" else None
        self.mlp = MoE(config)
        self.ple = PerLayerEmbedding(config, ple_index) if ple_index is not None else None
        self.attn_hyper_connection = HyperConnection(config)
        self.mlp_hyper_connection = HyperConnection(config)

    def forward(self, residual: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Rows of a step ``[N, S*H] -> [N, S*H]``."""
        if self.ple is not None:
            assert isinstance(cache.ple, ConvSlots)
            residual = self.ple(residual, step.batch, cache.ple)
        x, inject = self.attn_hyper_connection.read(residual)
        if self.linear_attn is not None:
            assert isinstance(cache.mixer, GatedDeltaSlots)
            y = self.linear_attn(x, step.batch, cache.mixer)
        else:
            assert self.self_attn is not None and isinstance(cache.mixer, QSALayerCache)
            y = self.self_attn(x, step, cache.mixer)
        residual = self.attn_hyper_connection.write(residual, y, inject)
        x, inject = self.mlp_hyper_connection.read(residual)
        return self.mlp_hyper_connection.write(residual, self.mlp(x, step.batch.decode), inject)


class Trunk(nn.Module):
    """Embedding, decoder layers and the final mixer; there is no norm after it."""

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, kind, _ple_index(config, i)) for i, kind in enumerate(config.layer_types)
        )
        self.hyper_connection_mixer = HyperConnection(config, inject=False)

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The residual stack of tokens ``[N]``: the embedding, once per stream, ``[N, S*H]``."""
        return self.embed_tokens(token_ids).to(dtype).repeat(1, self.config.hc_count)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin ``[N, rotary_dim]`` of positions ``[N]``, FP32."""
        return rotary_cos_sin(positions, self.config.rotary_dim, self.config.rope_theta)

    def forward(self, batch: RowBatch, cache: HybridCache) -> Tensor:
        """Residual streams ``[N, S*H]`` before the final mixer."""
        residual = self.embed(batch.token_ids, self.hyper_connection_mixer.hc_norm.weight.dtype)
        step = Step(batch, self.config, cache.tables)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            residual = layer(residual, step, layer_cache)
        return residual


def _ple_index(config: Qwen4ExpConfig, layer: int) -> int | None:
    if layer + 1 not in config.ple_layer_ids:
        return None
    return sorted(config.ple_layer_ids).index(layer + 1)
