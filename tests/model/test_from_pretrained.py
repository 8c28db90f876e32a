"""Loading checkpoint folders: those of transformers, whole or in shards, and every way they can be broken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from page4.kernels.errors import InputError
from page4.model import Qwen4ExpForCausalLM
from tests.oracle.hf_reference import hf_model
from tests.oracle.pairs import pair
from tests.oracle.tiny import random_tokens, tiny_dict, tiny_model

INDEX = "model.safetensors.index.json"


def write(folder: Path, weights: dict[str, torch.Tensor], shards: int = 1, **overrides: Any) -> Path:
    """A checkpoint folder with its tensors dealt out to one file or several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_dict(**overrides)), encoding="utf-8")
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        dealt = names[i::shards]
        save_file({name: weights[name] for name in dealt}, folder / file)
        weight_map |= dict.fromkeys(dealt, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def tiny_weights() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tiny_model(seed=4).state_dict().items()}


def same_weights(a: Qwen4ExpForCausalLM, weights: dict[str, torch.Tensor]) -> bool:
    own = a.state_dict()
    return own.keys() == weights.keys() and all(torch.equal(own[name], weights[name]) for name in own)


@pytest.mark.parametrize("shards", [1, 3])
def test_our_names_round_trip(tmp_path: Path, shards: int) -> None:
    weights = tiny_weights()
    model = Qwen4ExpForCausalLM.from_pretrained(write(tmp_path, weights, shards))
    assert same_weights(model, weights)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("max_shard_size", ["1GB", "150KB"], ids=["single file", "sharded"])
@pytest.mark.parametrize("ngram_parts", [1, 4])
def test_what_transformers_saves(tmp_path: Path, max_shard_size: str, ngram_parts: int) -> None:
    """Transformers stores one matrix per expert and the n-gram table in ``split_ngram_parts`` pieces."""
    values = tiny_dict(mtp_num_hidden_layers=0, split_ngram_parts=ngram_parts)
    theirs = hf_model(values, seed=6)
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size == "150KB")
    ours = Qwen4ExpForCausalLM.from_pretrained(tmp_path)
    assert same_weights(ours, dict(theirs.state_dict()))


def test_tied_embeddings_as_transformers_saves_them(tmp_path: Path) -> None:
    theirs = hf_model(tiny_dict(mtp_num_hidden_layers=0, tie_word_embeddings=True), seed=6)
    theirs.save_pretrained(tmp_path)
    ours = Qwen4ExpForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([random_tokens(9, 0)])
    assert (ours(tokens).logits - theirs(input_ids=tokens).logits).abs().max() <= 1e-4


def test_a_tied_checkpoint_may_carry_a_copy_of_the_head(tmp_path: Path) -> None:
    weights = {k: v.clone() for k, v in tiny_model(tie_word_embeddings=True).state_dict().items()}
    weights["lm_head.weight"] = torch.zeros(128, 48)
    model = Qwen4ExpForCausalLM.from_pretrained(write(tmp_path, weights, tie_word_embeddings=True))
    hidden = torch.randn(3, 48)
    assert torch.equal(model.head(hidden), hidden @ model.model.embed_tokens.weight.T)


def test_the_multimodal_layout(tmp_path: Path) -> None:
    """Text tensors under ``model.language_model.``; those of the vision tower are left alone."""
    weights = tiny_weights()
    nested = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in weights.items()}
    nested["model.visual.patch_embed.proj.weight"] = torch.zeros(2)
    folder = write(tmp_path, nested)
    wrapped = {"model_type": "qwen4_exp", "text_config": tiny_dict(), "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(wrapped), encoding="utf-8")
    assert same_weights(Qwen4ExpForCausalLM.from_pretrained(folder), weights)


def test_dtype_is_converted_but_for_the_decay_parameters(tmp_path: Path) -> None:
    model = Qwen4ExpForCausalLM.from_pretrained(write(tmp_path, tiny_weights()), dtype=torch.float16)
    assert model.dtype == torch.float16
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {f"model.layers.{i}.linear_attn.{p}" for i in (0, 1) for p in ("A_log", "dt_bias")}


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 0.05), (torch.bfloat16, 0.2)])
def test_16_bit_activations_stay_close(tmp_path: Path, dtype: torch.dtype, error: float) -> None:
    """Within rounding, and the few blocks and experts whose choice rounding may change."""
    folder = write(tmp_path, tiny_weights())
    tokens = torch.tensor([random_tokens(61, 0)])
    expected = Qwen4ExpForCausalLM.from_pretrained(folder)(tokens).logits
    logits = Qwen4ExpForCausalLM.from_pretrained(folder, dtype=dtype)(tokens).logits
    assert logits.dtype == dtype
    assert (logits.float() - expected).std() <= error * expected.std()


def test_float32_is_the_default_on_the_cpu_whatever_is_stored(tmp_path: Path) -> None:
    halved = {k: v.half() if v.is_floating_point() else v for k, v in tiny_weights().items()}
    model = Qwen4ExpForCausalLM.from_pretrained(write(tmp_path, halved))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_loaded_model_still_equals_transformers(tmp_path: Path) -> None:
    p = pair("base")
    model = Qwen4ExpForCausalLM.from_pretrained(write(tmp_path, dict(p.ours.state_dict())))
    assert (model(torch.tensor([p.tokens])).logits[0] - p.reference.logits).abs().max() <= 1e-4


def refusal(folder: Path) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(InputError) as caught:
        Qwen4ExpForCausalLM.from_pretrained(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_folder(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert refusal(missing) == f"{missing / 'config.json'}: cannot be read (No such file or directory)"


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert refusal(file).startswith(f"{file / 'config.json'}: cannot be read")


def test_a_config_without_weights(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_weights())
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"{folder}: no checkpoint there (expected {INDEX} or model.safetensors)"


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_weights(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert refusal(folder) == f"{folder}: shard model-00002-of-00003.safetensors is missing"


@pytest.mark.parametrize(
    "keep", [0, 5, 200, -1], ids=["empty", "header cut", "in the header", "last byte gone"]
)
def test_a_truncated_shard(tmp_path: Path, keep: int) -> None:
    folder = write(tmp_path, tiny_weights(), shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    assert refusal(folder).startswith(f"{shard}: not a readable safetensors file")


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff", b'{"weight_map": 3}', b"{}", b'{"weight_map": {"a": 1}}']
)
def test_a_broken_index(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, tiny_weights(), shards=3)
    (folder / INDEX).write_bytes(content)
    assert refusal(folder).startswith(str(folder))


def test_a_missing_tensor(tmp_path: Path) -> None:
    weights = tiny_weights()
    del weights["model.layers.2.self_attn.k_norm.weight"]
    assert refusal(write(tmp_path, weights)) == (
        f"{tmp_path}: checkpoint lacks model.layers.2.self_attn.k_norm.weight"
    )


def test_all_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in tiny_weights().items() if not name.endswith("hc_norm.weight")}
    assert refusal(write(tmp_path, weights)) == (
        f"{tmp_path}: checkpoint lacks "
        "model.hyper_connection_mixer.hc_norm.weight, "
        "model.layers.{0-3}.attn_hyper_connection.hc_norm.weight, "
        "model.layers.{0-3}.mlp_hyper_connection.hc_norm.weight, "
        "mtp.hyper_connection_mixer.hc_norm.weight, "
        "mtp.layers.0.attn_hyper_connection.hc_norm.weight, "
        "mtp.layers.0.mlp_hyper_connection.hc_norm.weight"
    )


def test_a_missing_piece(tmp_path: Path) -> None:
    hf_model(tiny_dict(mtp_num_hidden_layers=0), seed=6).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(weights, file)
    assert refusal(tmp_path) == f"{tmp_path}: checkpoint lacks model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "mtp.fc.weight",
        "model.layers.2.self_attn.k_scale",
        "model.layers.9.mlp.gate.weight",
    ],
)
def test_an_unknown_tensor(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, tiny_weights() | {name: torch.ones(2)})
    assert refusal(folder) == f"{folder}: not part of this model: {name}"


def test_missing_and_unknown_tensors_are_said_together(tmp_path: Path) -> None:
    """A misspelt name is recognised by the two."""
    weights = tiny_weights()
    weights["model.layers.0.mlp.router.weight"] = weights.pop("model.layers.0.mlp.gate.weight")
    assert refusal(write(tmp_path, weights)) == (
        f"{tmp_path}: checkpoint lacks model.layers.0.mlp.gate.weight; "
        "not part of this model: model.layers.0.mlp.router.weight"
    )


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("lm_head.weight", (64, 48), "[128, 48]"),
        ("mtp.layers.0.mlp.experts.down_proj", (6, 24, 48), "[6, 48, 24]"),
    ],
)
def test_a_tensor_of_another_shape(tmp_path: Path, name: str, shape: tuple[int, ...], expected: str) -> None:
    folder = write(tmp_path, tiny_weights() | {name: torch.zeros(shape)})
    message = f"{folder / 'model.safetensors'}: {name} has shape {list(shape)}, expected {expected}"
    assert refusal(folder) == message


def test_a_piece_of_another_shape(tmp_path: Path) -> None:
    hf_model(tiny_dict(mtp_num_hidden_layers=0), seed=6).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.experts.2.gate_proj.weight"
    save_file(load_file(file) | {name: torch.zeros(23, 48)}, file)
    assert refusal(tmp_path) == f"{file}: {name} has shape [23, 48], expected [24, 48]"


def test_a_tensor_whole_and_in_pieces(tmp_path: Path) -> None:
    piece = {"model.layers.0.mlp.experts.2.gate_proj.weight": torch.zeros(24, 48)}
    assert refusal(write(tmp_path, tiny_weights() | piece)) == (
        f"{tmp_path}: model.layers.0.mlp.experts.gate_up_proj is stored twice, whole and in pieces"
    )


def test_a_dtype_that_is_none_of_a_weight(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_weights() | {"lm_head.weight": torch.zeros(128, 48, dtype=torch.int32)})
    assert refusal(folder).endswith("lm_head.weight is I32, expected F32 or BF16 or F16 or F64")


@pytest.mark.parametrize(("value", "dtype"), [("nan", "float32"), ("inf", "float32"), ("1e5", "float16")])
def test_values_that_a_weight_cannot_have(tmp_path: Path, value: str, dtype: str) -> None:
    weights = tiny_weights()
    weights["model.layers.1.linear_attn.out_proj.weight"][3, 5] = float(value)
    folder = write(tmp_path, weights)
    with pytest.raises(InputError) as caught:
        Qwen4ExpForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    assert str(caught.value) == (
        f"{folder / 'model.safetensors'}: model.layers.1.linear_attn.out_proj.weight holds NaN, infinity, or "
        f"values too large for torch.{dtype}"
    )


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_weights(), shards=3)
    index = json.loads((folder / INDEX).read_text())
    name = "model.embed_tokens.weight"
    place = index["weight_map"][name]
    index["weight_map"][name] = next(f for f in index["weight_map"].values() if f != place)
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(folder) == f"{folder}: {place} holds {name}, the index says otherwise"


def test_a_tensor_that_only_the_index_has(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_weights(), shards=3)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(folder) == f"{folder}: shards lack what the index lists: model.norm.weight"


def test_one_name_in_both_layouts(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["model.language_model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    assert "model.embed_tokens.weight is stored twice" in refusal(write(tmp_path, weights))


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("../other.safetensors", "is no name of a safetensors file in this folder"),
        ("config.json", "is no name of a safetensors file in this folder"),
        ("\0", "is no name of a safetensors file in this folder"),
        (7, "is no name of a safetensors file in this folder"),
        ("a" * 400 + ".safetensors", "is missing"),
    ],
)
def test_an_index_that_names_what_is_no_shard(tmp_path: Path, file: str | int, complaint: str) -> None:
    folder = write(tmp_path / "model", tiny_weights())
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    names = dict.fromkeys(tiny_weights(), file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    message = refusal(folder)
    assert message.startswith(str(folder)) and message.endswith(complaint)


def test_a_config_that_does_not_fit_the_weights(tmp_path: Path) -> None:
    folder = write(tmp_path, tiny_weights(), head_dim=64)
    assert "has shape" in refusal(folder)
