"""Per-layer embeddings: n-gram memory gated into the residual streams."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from page4.kernels.backend import Backend
from page4.kernels.gated_delta import causal_conv1d_reference
from page4.kernels.norm_rope import rms_norm_zero_centred
from page4.kvcache.recurrent import ConvSlots

from .config import Qwen4ExpConfig
from .ngram import NGramEmbedding
from .rows import RowBatch
from .weights import Weight, projection


class PerLayerEmbedding(nn.Module):
    """Adds a gated n-gram value and its dilated causal convolution to every stream.

    Per stream c, with grouped zero-centred norms::

        s_c = <norm(W_k e)_c, norm(R)_c> / sqrt(H),  s' = sign(s) sqrt(max(|s|, 1e-6))
        G_c = sigmoid(s'_c) W_v e,   R <- R + G + silu(conv(norm(G)))

    The convolution is depthwise with dilation ``ngram_size``. Source: Qwen4Exp reference implementation.
    """

    def __init__(self, config: Qwen4ExpConfig, index: int = 0) -> None:
        super().__init__()
        self.streams = config.hc_count
        self.hidden_size = config.hidden_size
        self.eps = config.rms_norm_eps
        self.dilation = config.ngram_size
        self.backend: Backend = "reference"
        width = config.stream_size
        self.ple_embedding = NGramEmbedding(config, index)
        self.key_proj = projection(width, config.ple_embed_dim)
        self.value_proj = projection(config.hidden_size, config.ple_embed_dim, gain=0.1)
        self.norm_key = Weight(width)
        self.norm_query = Weight(width)
        self.norm_conv = Weight(width)
        self.conv1d = Weight(width, 1, config.ple_conv_kernel_size)

    def gate(self, residual: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Gated values ``[N, S*H]`` and their norm, the convolution's input, both FP32.

        Args:
            residual: ``[N, S*H]``. embedding: ``[N, ple_embed_dim]``.
        """
        shape = (self.streams, self.hidden_size)
        key = self._norm(self.key_proj(embedding), self.norm_key).unflatten(-1, shape).float()
        query = self._norm(residual, self.norm_query).unflatten(-1, shape).float()
        score = (key * query).sum(-1, keepdim=True) / math.sqrt(self.hidden_size)  # [N, S, 1]
        score = score.sign() * score.abs().clamp_min(1e-6).sqrt()
        gated = (torch.sigmoid(score) * self.value_proj(embedding).unsqueeze(-2).float()).flatten(-2)
        return gated, self._norm(gated, self.norm_conv)

    def add(self, residual: Tensor, gated: Tensor, convolved: Tensor) -> Tensor:
        """``R + G + silu(conv)``, in the dtype of the residual."""
        return (residual + gated + F.silu(convolved)).to(residual.dtype)

    def forward(self, residual: Tensor, batch: RowBatch, slots: ConvSlots) -> Tensor:
        """Rows of a step ``[N, S*H] -> [N, S*H]``; reads and advances the convolution state."""
        embedding = self.ple_embedding(batch.token_history).to(residual.dtype)
        gated, normed = self.gate(residual, embedding)
        return self.add(residual, gated, self.convolve(normed, batch, slots))

    def convolve(self, normed: Tensor, batch: RowBatch, slots: ConvSlots) -> Tensor:
        """The convolution of a step's rows, FP32 ``[N, S*H]``; advances its state."""
        if self.backend == "triton":
            from .recurrent_triton import convolve_triton  # see Step.kernels

            return convolve_triton(self, normed, batch, slots)
        convolved = torch.empty_like(normed)
        for group in batch.groups:
            inputs = group.rows_of(normed)
            positions = group.rows_of(batch.positions)[:, 0]
            y, _ = causal_conv1d_reference(
                inputs,
                self.conv1d.weight.squeeze(1),
                slots.window(group.requests, positions).to(normed.dtype),
                dilation=self.dilation,
            )
            group.put_rows(convolved, y)
            slots.store(group.requests, positions, inputs)
        return convolved

    def _norm(self, x: Tensor, weight: Weight) -> Tensor:
        return rms_norm_zero_centred(x, weight.weight, self.eps, group_size=self.hidden_size)
