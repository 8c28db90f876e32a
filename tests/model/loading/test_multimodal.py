"""The multimodal class as transformers saves it: text tensors under another prefix, and a vision tower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForConditionalGeneration

from page4.model import Qwen4ExpForCausalLM
from tests.oracle.hf_reference import hf_config
from tests.oracle.tiny import randomise, tiny_dict

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}


@pytest.mark.parametrize("max_shard_size", ["1GB", "200KB"])
def test_the_class_with_a_vision_tower(tmp_path: Path, max_shard_size: str) -> None:
    text = hf_config(tiny_dict(split_ngram_parts=2)).to_dict()
    theirs = Qwen4ExpForConditionalGeneration(Qwen4ExpConfig(text_config=text, vision_config=VISION))
    theirs = theirs.eval().float()
    randomise(theirs, 3)
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert any(name.startswith("model.visual.") for name in names)
    assert any(name.startswith("model.language_model.layers.0.mlp.experts.0.") for name in names)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 0  # transformers has no MTP head to save
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = Qwen4ExpForCausalLM.from_pretrained(tmp_path).state_dict()
    expected = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in theirs.state_dict().items()
        if not name.startswith("model.visual.")
    }
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own)
