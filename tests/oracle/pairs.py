"""Pairs of models with equal weights: one of transformers, one of ours, and a sequence to compare them on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM as HFModel

from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM

from .hf_mtp import ReferenceMTP, reference_mtp
from .hf_reference import Reference, hf_model, safe_tokens
from .tiny import EOS, random_tokens, tiny_dict

LENGTH = 61  # no multiple of the block, the page, or the chunks in use

_SIX_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"] * 2
# Overrides of the tiny config. Rotary dimension is a quarter of head_dim; mrope_section sums to half of it.
CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "one_kv_head": {"num_key_value_heads": 1},
    "kv_head_per_query_head": {"num_key_value_heads": 4},
    "head_dim_64": {"head_dim": 64, "rope_parameters": [4, 2, 2]},
    "head_dim_128": {"head_dim": 128, "indexer_head_dim": 48, "rope_parameters": [6, 5, 5]},
    "one_block_budget": {"indexer_budget": 4},
    "context_within_budget": {"indexer_budget": 64},
    "four_index_heads": {"indexer_n_heads": 4},
    "ratio_2": {"indexer_compress_ratio": 2},
    "ratio_8": {"indexer_compress_ratio": 8},
    "no_ple": {"ple_layer_ids": []},
    "ple_in_first_layer": {"ple_layer_ids": [1]},
    "six_layers_two_ple": {
        "num_hidden_layers": 6,
        "layer_types": _SIX_LAYERS[:6],
        "ple_layer_ids": [1, 4],
    },
    "default_layer_types": {"num_hidden_layers": 5, "layer_types": None, "ple_layer_ids": [3]},
    "longer_ngrams": {"ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 24, "ple_conv_kernel_size": 3},
    "other_delta_heads": {"linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_conv_kernel_dim": 3},
    "two_streams": {"hc_count": 2},
    "experts_not_renormalised": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "tied_embeddings": {"tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Pair:
    """Two models with the same weights.

    Attributes:
        hf, hf_mtp: transformers' model and the MTP head made of its modules.
        ours: our model with the same weights.
        tokens: a sequence with single and adjacent EOS inside.
        reference: what transformers computes for it.
    """

    hf: HFModel
    hf_mtp: ReferenceMTP
    ours: Qwen4ExpForCausalLM
    tokens: list[int]
    reference: Reference


def config_values(name: str) -> dict[str, Any]:
    """``config.json`` contents of a named config."""
    overrides = dict(CONFIGS[name])
    if "rope_parameters" in overrides:
        section = overrides["rope_parameters"]
        overrides["rope_parameters"] = tiny_dict()["rope_parameters"] | {"mrope_section": section}
    return tiny_dict(**overrides)


@cache
def pair(name: str) -> Pair:
    """The models of a named config."""
    values = config_values(name)
    hf = hf_model(values, seed=1)
    head = reference_mtp(hf, seed=2)
    ours = Qwen4ExpForCausalLM(Qwen4ExpConfig.from_dict(values)).eval().requires_grad_(False)
    weights = hf.state_dict() | {f"mtp.{k}": v for k, v in head.state_dict().items()}
    if values["tie_word_embeddings"]:
        del weights["lm_head.weight"]  # transformers lists the shared tensor twice
    ours.load_state_dict(weights)
    tokens, reference = safe_tokens(hf, tokens_with_eos)
    return Pair(hf, head, ours, tokens, reference)


def tokens_with_eos(seed: int, length: int = LENGTH) -> list[int]:
    """Random tokens with an EOS, two adjacent ones, and one at the end of a page."""
    tokens = random_tokens(length, seed)
    for position in (15, 22, 40, 41):
        tokens[position] = EOS
    return tokens
