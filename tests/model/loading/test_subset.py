"""Some layers of a checkpoint: their weights under new numbers, and nothing else is needed or read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from page4.kernels.errors import InputError
from page4.model import Qwen4ExpForCausalLM
from tests.oracle.tiny import random_tokens, tiny_dict, tiny_model

SIX = {
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
    "ple_layer_ids": [1, 4],
}


def write(folder: Path, layers_apart: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint of six layers with PLE in the first and fourth; one shard a layer if wanted."""
    weights = {name: tensor.clone() for name, tensor in tiny_model(seed=5, **SIX).state_dict().items()}
    (folder / "config.json").write_text(json.dumps(tiny_dict(**SIX)), encoding="utf-8")
    if not layers_apart:
        save_file(weights, folder / "model.safetensors")
        return weights
    weight_map = {
        name: f"layer-{name.split('.')[2]}.safetensors" if name.startswith("model.l") else "rest.safetensors"
        for name in weights
    }
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weights


@pytest.mark.parametrize("layers", [(0,), (1,), (1, 4), (0, 1, 3), (0, 1, 2, 3, 4, 5), (2, 5)])
def test_layers_are_counted_anew(layers: tuple[int, ...], tmp_path: Path) -> None:
    weights = write(tmp_path)
    model = Qwen4ExpForCausalLM.from_pretrained(tmp_path, layers=layers)
    own = model.state_dict()
    for new, old in enumerate(layers):
        theirs = {n.split(".", 3)[3]: w for n, w in weights.items() if n.startswith(f"model.layers.{old}.")}
        ours = {n.split(".", 3)[3]: w for n, w in own.items() if n.startswith(f"model.layers.{new}.")}
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    others = {name: w for name, w in weights.items() if not name.startswith("model.layers.")}
    assert all(torch.equal(own[name], w) for name, w in others.items())
    assert model(torch.tensor([random_tokens(30, 0)])).logits.isfinite().all()


def test_all_layers_are_the_model(tmp_path: Path) -> None:
    write(tmp_path)
    tokens = torch.tensor([random_tokens(30, 0)])
    whole = Qwen4ExpForCausalLM.from_pretrained(tmp_path)(tokens).logits
    assert torch.equal(Qwen4ExpForCausalLM.from_pretrained(tmp_path, layers=range(6))(tokens).logits, whole)


def test_shards_of_other_layers_need_not_be_there(tmp_path: Path) -> None:
    write(tmp_path, layers_apart=True)
    (tmp_path / "layer-0.safetensors").unlink()
    (tmp_path / "layer-2.safetensors").write_bytes(b"not a safetensors file")
    Qwen4ExpForCausalLM.from_pretrained(tmp_path, layers=(1, 4))
    with pytest.raises(InputError, match=r"shard layer-0\.safetensors is missing"):
        Qwen4ExpForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"layer-2\.safetensors: not a readable safetensors file"):
        Qwen4ExpForCausalLM.from_pretrained(tmp_path, layers=(2,))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "expected layers from 0 to 5"),
        ((6,), "expected layers from 0 to 5"),
        ((-1,), "expected layers from 0 to 5"),
        ((True,), "expected layers from 0 to 5"),
        (("1",), "expected layers from 0 to 5"),
        ((4, 1), "expected ascending ones"),
        ((1, 1), "expected ascending ones"),
        ((3,), "a PLE layer needs those before it"),
    ],
)
def test_layers_that_make_no_model(layers: tuple[int, ...], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match=message):
        Qwen4ExpForCausalLM.from_pretrained(tmp_path, layers=layers)


def test_a_layer_beyond_the_config_is_unknown(tmp_path: Path) -> None:
    weights = write(tmp_path)
    weights["model.layers.6.mlp.gate.weight"] = torch.zeros(6, 48)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"not part of this model: model\.layers\.6\.mlp\.gate\.weight"):
        Qwen4ExpForCausalLM.from_pretrained(tmp_path, layers=(1,))
