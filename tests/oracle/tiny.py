"""Tiny models: a config that both implementations read, and random weights that leave nothing idle."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM

EOS = 0

# Four layers, sparse from 20 tokens on (budget 16), rotary dimension 8, one PLE layer; as in a config.json.
_TINY: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 128,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 12,
    "ple_layer_ids": [2],  # one-indexed
    "ple_embed_dim": 32,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 500,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 1,
    "seed": 1234,
    "eos_token_id": EOS,
    "bos_token_id": EOS,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
}


def tiny_dict(**overrides: Any) -> dict[str, Any]:
    """The contents of a ``config.json`` of a tiny model."""
    return {**_TINY, **overrides}


def tiny_model(seed: int = 0, **overrides: Any) -> Qwen4ExpForCausalLM:
    """A random tiny model in FP32."""
    model = Qwen4ExpForCausalLM(Qwen4ExpConfig.from_dict(tiny_dict(**overrides)))
    randomise(model, seed)
    return model.eval().requires_grad_(False)


def agreeable_model(seed: int = 0, noise: float = 0.2, **overrides: Any) -> Qwen4ExpForCausalLM:
    """A tiny model whose MTP head often agrees with it, so that any number of drafts is accepted at times.

    Blocks write little into the streams (``noise``), so the next token mostly depends on the last one, and
    the MTP head passes its token's embedding on to a copy of the target's final mixer. What all other parts
    contribute decides where the two differ.
    """
    model = tiny_model(seed, **overrides)
    assert model.mtp is not None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(
                ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight", "value_proj.weight")
            ):
                parameter.mul_(noise)
        hidden = model.config.hidden_size
        model.mtp.pre_fc_norm_embedding.weight.zero_()
        model.mtp.fc_embedding.weight.copy_(torch.eye(hidden))
        model.mtp.fc_hidden.weight.mul_(noise)
        model.mtp.hyper_connection_mixer.load_state_dict(model.model.hyper_connection_mixer.state_dict())
    return model


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Random weights by parameter name, the same for every implementation that uses the published names.

    Freshly initialised norms and PLE convolutions are zero, which would hide errors in them.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: nn.Parameter, std: float, mean: float = 0.0) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    for name, parameter in sorted(module.named_parameters()):
        if name.endswith("A_log"):
            parameter.copy_(torch.empty(parameter.shape).uniform_(0.05, 4.0, generator=generator).log())
        elif name.endswith("dt_bias"):
            normal(parameter, 0.5)
        elif name.endswith("linear_attn.norm.weight"):
            normal(parameter, 0.2, mean=1.0)
        elif parameter.ndim == 1:
            normal(parameter, 0.2)
        elif "conv1d" in name:
            normal(parameter, 0.4)
        elif "embed" in name or "lm_head" in name:
            normal(parameter, 1.0)
        else:
            normal(parameter, 1.2 / math.sqrt(parameter.shape[-1]))


def random_tokens(count: int, seed: int, vocab_size: int = 128) -> list[int]:
    """Token ids without EOS."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (count,), generator=generator).tolist()
