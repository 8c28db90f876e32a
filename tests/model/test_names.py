"""State-dict names are those of the published checkpoint."""

from __future__ import annotations

import pytest

from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from tests.oracle.hf_reference import hf_model
from tests.oracle.pairs import CONFIGS, config_values
from tests.oracle.tiny import tiny_dict, tiny_model

_HYPER_CONNECTION = ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")
_MTP_LAYER = (
    *(f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"self_attn.indexer.{part}.weight" for part in ("index_qk_proj", "q_layernorm", "k_layernorm")),
    "mlp.gate.weight",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    *(f"mlp.shared_expert.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")),
    "mlp.shared_expert_gate.weight",
    *(
        f"{connection}.{part}.weight"
        for connection in ("attn_hyper_connection", "mlp_hyper_connection")
        for part in (*_HYPER_CONNECTION, "block_inject_weight")
    ),
)
MTP_NAMES = {
    *(
        f"mtp.{n}.weight"
        for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc_embedding", "fc_hidden")
    ),
    *(f"mtp.layers.0.{name}" for name in _MTP_LAYER),
    *(f"mtp.hyper_connection_mixer.{part}.weight" for part in _HYPER_CONNECTION),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_target_names_and_shapes_equal_those_of_transformers(name: str) -> None:
    values = config_values(name)
    theirs = {k: (v.shape, v.dtype) for k, v in hf_model(values).state_dict().items()}
    if values["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    ours = Qwen4ExpForCausalLM(Qwen4ExpConfig.from_dict(values)).state_dict()
    assert {k: (v.shape, v.dtype) for k, v in ours.items() if not k.startswith("mtp.")} == theirs


def test_the_mtp_head_has_its_31_published_tensors() -> None:
    names = {name for name in tiny_model().state_dict() if name.startswith("mtp.")}
    assert len(MTP_NAMES) == 31
    assert names == MTP_NAMES


def test_a_config_without_mtp_layers_has_no_head() -> None:
    assert not any(name.startswith("mtp.") for name in tiny_model(mtp_num_hidden_layers=0).state_dict())


def test_n_gram_tables_are_buffers_of_the_checkpoint() -> None:
    config = Qwen4ExpConfig.from_dict(tiny_dict())
    names = Qwen4ExpForCausalLM(config).state_dict().keys()
    for buffer in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
        assert f"model.layers.1.ple.ple_embedding.{buffer}" in names
