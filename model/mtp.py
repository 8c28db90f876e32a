"""The multi-token-prediction head: one QSA layer that drafts tokens, applied again to its own output."""

from __future__ import annotations

from torch import Tensor, nn

from page4.kernels.backend import Backend
from page4.kernels.norm_rope import rms_norm_zero_centred
from page4.kvcache.cache import LayerCache

from .config import Qwen4ExpConfig
from .decoder import DecoderLayer
from .hyper_connection import HyperConnection
from .step import Step
from .weights import Weight, projection


class MTPHead(nn.Module):
    """Row p takes token x_{p+1} and the residual streams R_p and predicts x_{p+2}.

    ``R_c = W_h norm(R)_c + W_e norm(embed(x))`` for every stream c, with *one* norm over all S*H values; then
    a decoder layer without PLE and the head's own final mixer. Draft step 0 reads the target's streams, later
    steps the head's own. Embedding and LM head are the target's.
    Source: the MTP layout of Qwen4Exp in vLLM and SGLang.
    """

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        self.backend: Backend = "reference"
        self.streams, self.eps = config.hc_count, config.rms_norm_eps
        hidden = config.hidden_size
        self.pre_fc_norm_embedding = Weight(hidden)
        self.pre_fc_norm_hidden = Weight(config.stream_size)
        self.fc_embedding = projection(hidden, hidden, gain=1.0)
        self.fc_hidden = projection(hidden, hidden, gain=1.0)
        self.layers = nn.ModuleList([DecoderLayer(config, "qsa_attention")])
        self.hyper_connection_mixer = HyperConnection(config, inject=False)

    def combine(self, embedding: Tensor, streams: Tensor) -> Tensor:
        """Joins token embeddings ``[N, H]`` and streams ``[N, S*H]`` into a residual ``[N, S*H]``."""
        e = self.fc_embedding(self._norm(embedding, self.pre_fc_norm_embedding))
        normed = self._norm(streams, self.pre_fc_norm_hidden)
        h = self.fc_hidden(normed.unflatten(-1, (self.streams, -1)))  # [N, S, H]
        return (h + e.unsqueeze(-2)).flatten(-2).to(streams.dtype)

    def _norm(self, x: Tensor, weight: Weight) -> Tensor:
        if self.backend == "triton":
            from page4.kernels.hyper_connection_triton import group_norm_triton  # see Step.kernels

            return group_norm_triton(x, weight.weight, 1, self.eps)
        return rms_norm_zero_centred(x, weight.weight, self.eps)

    def forward(self, embedding: Tensor, streams: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """New streams ``[N, S*H]``; the final mixer turns them into the LM head's input."""
        return self.layers[0](self.combine(embedding, streams), step, cache)
