"""An MTP head put together from transformers' own Qwen4Exp modules; transformers itself has none.

Layout of the published checkpoint (31 tensors under ``mtp.``) as vLLM and SGLang run it: one norm over all
streams, two projections whose sum enters one QSA decoder layer, and a final mixer before the LM head.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpForCausalLM,
    Qwen4ExpTextDecoderLayer,
    Qwen4ExpTextGatedResidual,
    Qwen4ExpTextRMSNorm,
)

from .tiny import randomise


class ReferenceMTP(nn.Module):
    """Row p takes ``embed(x_{p+1})`` and the streams of position p."""

    def __init__(self, config: Qwen4ExpTextConfig) -> None:
        super().__init__()
        own = copy.deepcopy(config)
        own.num_hidden_layers, own.layer_types, own.ple_layer_ids = 1, ["indexed_attention"], []
        own.number_of_conv_states = 1
        self.config = own
        hidden, streams = config.hidden_size, config.hc_count
        self.pre_fc_norm_embedding = Qwen4ExpTextRMSNorm(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen4ExpTextRMSNorm(streams * hidden, eps=config.rms_norm_eps)
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Qwen4ExpTextDecoderLayer(own, 0)])
        self.hyper_connection_mixer = Qwen4ExpTextGatedResidual(own, use_combine=False)

    def forward(self, embedding: Tensor, streams: Tensor, rotary: nn.Module, cache: DynamicCache) -> Tensor:
        """New streams ``[T, S*H]`` of the next rows: ``embedding [T, H]``, ``streams [T, S*H]``."""
        e = self.fc_embedding(self.pre_fc_norm_embedding(embedding))
        h = self.fc_hidden(self.pre_fc_norm_hidden(streams).unflatten(-1, (self.config.hc_count, -1)))
        residual = (h + e.unsqueeze(-2)).flatten(-2)[None]
        past = cache.get_seq_length(0)
        length = past + embedding.shape[0]
        everything = torch.arange(length)
        cos_sin = rotary(residual[..., : self.config.hidden_size], everything.expand(3, 1, -1))
        causal = everything <= torch.arange(past, length)[:, None]
        return self.layers[0](
            residual, position_embeddings=cos_sin, attention_mask=causal[None, None], cache=cache
        )[0]


class MTPRunner:
    """Draft steps of one request with transformers' cache."""

    def __init__(self, model: Qwen4ExpForCausalLM, head: ReferenceMTP) -> None:
        self.model, self.head = model, head
        self.cache = DynamicCache(config=head.config)

    @torch.no_grad()
    def step(self, tokens: list[int], streams: Tensor) -> tuple[Tensor, Tensor]:
        """Streams ``[T, S*H]`` and draft logits ``[T, V]`` of the next rows."""
        embedding = self.model.model.embed_tokens(torch.tensor(tokens))
        out = self.head(embedding, streams, self.model.model.rotary_emb, self.cache)
        return out, self.model.lm_head(self.head.hyper_connection_mixer(out[None])[0])

    def forget(self, rows: int) -> None:
        """Drops the last rows: they were computed from the head's own streams."""
        if rows:
            self.cache.crop(-rows)


def reference_mtp(model: Qwen4ExpForCausalLM, seed: int) -> ReferenceMTP:
    """A random MTP head for a transformers model, in FP32."""
    head = ReferenceMTP(model.config).eval().float()
    randomise(head, seed)
    return head.requires_grad_(False)
