"""Quantised checkpoints: what is loaded is what the encoder meant, bit for bit, and the logits follow."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn

from page4.kernels.errors import InputError
from page4.model import Qwen4ExpForCausalLM
from page4.model.loader import load_weights
from page4.model.loading.quantisation import Quantisation, quantisation
from page4.model.weights import Weight
from tests.oracle.hf_reference import hf_model, safe_tokens
from tests.oracle.tiny import random_tokens, tiny_dict, tiny_model

from .encoders import awq, block_fp8, compressed, compressed_with_zero_points, encode

# Sizes that groups of 32 divide; wider than a block of 128 where it shows: 160 is a block and a part of one.
SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed_config(symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | changes}},
        "ignore": ["lm_head"],
    }


FORMS = {
    "fp8": (block_fp8, FP8_CONFIG),
    "compressed-tensors": (compressed, compressed_config()),
    "compressed-tensors with zero points": (compressed_with_zero_points, compressed_config(symmetric=False)),
    "awq": (awq, AWQ_CONFIG),
}
LINEAR = (
    r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|experts\.\d+\.\w+|"
    r"shared_expert\.\w+)\.weight$"
)


def write(
    folder: Path, stored: dict[str, Tensor], quantised: dict[str, Any] | None, **overrides: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_dict(**SIZES | overrides)
    if quantised is not None:
        config["quantization_config"] = quantised
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return folder


def saved_by_transformers(folder: Path) -> dict[str, Tensor]:
    """One matrix per expert, as transformers writes them."""
    hf_model(tiny_dict(mtp_num_hidden_layers=0, **SIZES), seed=6).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def logits(folder: Path) -> Tensor:
    return Qwen4ExpForCausalLM.from_pretrained(folder)(torch.tensor([random_tokens(40, 0)])).logits


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_dequantised_model(form: str, tmp_path: Path) -> None:
    encoder, config = FORMS[form]
    weights = saved_by_transformers(tmp_path / "hf")
    stored, meant = encode(weights, LINEAR, encoder)
    assert len(stored) > len(meant)
    quantised = write(tmp_path / "quantised", stored, config, mtp_num_hidden_layers=0)
    dequantised = write(tmp_path / "dequantised", meant, None, mtp_num_hidden_layers=0)
    result = logits(quantised)
    assert torch.equal(result, logits(dequantised))
    assert not torch.equal(result, logits(tmp_path / "hf"))


def test_transformers_dequantises_the_same_logits(tmp_path: Path) -> None:
    """A transformers model with the weights that the encoder meant."""
    theirs = hf_model(tiny_dict(mtp_num_hidden_layers=0, **SIZES), seed=6)
    stored, meant = encode(saved_by_transformers(tmp_path / "hf"), LINEAR, awq)
    fused = dict(theirs.state_dict())
    ours = Qwen4ExpForCausalLM.from_pretrained(
        write(tmp_path / "meant", meant, None, mtp_num_hidden_layers=0)
    ).state_dict()
    assert fused.keys() == ours.keys()
    theirs.load_state_dict(ours)
    tokens, reference = safe_tokens(theirs, lambda seed: random_tokens(40, seed))
    folder = write(tmp_path / "awq", stored, AWQ_CONFIG, mtp_num_hidden_layers=0)
    model = Qwen4ExpForCausalLM.from_pretrained(folder)
    assert (model(torch.tensor([tokens])).logits[0] - reference.logits).abs().max() <= 1e-4


def test_an_fp8_draft_beside_4_bit_layers(tmp_path: Path) -> None:
    """The MTP head's fused experts have FP8 blocks, per-expert matrices of the target 4-bit integers."""
    weights = {name: tensor.clone() for name, tensor in tiny_model(seed=3, **SIZES).state_dict().items()}
    stored, meant = encode(weights, r"^mtp\..*experts\.\w+$", block_fp8)
    assert stored["mtp.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (6, 1, 2)
    stored, more = encode(stored, r"^model\..*self_attn\.[qkvo]_proj\.weight$", awq)
    meant |= {name: more[name] for name in meant.keys() & more.keys() if not name.startswith("mtp.")}
    model = Qwen4ExpForCausalLM.from_pretrained(write(tmp_path, stored, AWQ_CONFIG))
    own = model.state_dict()
    assert own.keys() == meant.keys()
    assert [name for name in own if not torch.equal(own[name], meant[name])] == []


def test_fp8_as_transformers_encodes_it(tmp_path: Path) -> None:
    """Their quantiser wants whole blocks; codes and scales are theirs, and so is the dequantisation."""
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=[16, 32], scale_fmt="float")
    quantiser = SimpleNamespace(quantization_config=config)
    weights = saved_by_transformers(tmp_path / "hf")
    stored, meant = dict(weights), dict(weights)
    for name in [name for name in weights if name.endswith(("q_proj.weight", "up_proj.weight"))]:
        parts = Fp8Quantize(quantiser)._quantize_one(name, stored.pop(name))
        stored |= parts
        meant[name] = Fp8Dequantize(quantiser)._dequantize_one(parts[name], parts[f"{name}_scale_inv"])
    settings = FP8_CONFIG | {"weight_block_size": [16, 32]}
    quantised = write(tmp_path / "fp8", stored, settings, mtp_num_hidden_layers=0)
    dequantised = write(tmp_path / "meant", meant, None, mtp_num_hidden_layers=0)
    assert torch.equal(logits(quantised), logits(dequantised))


class One(nn.Module):
    """A model of a single matrix."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.proj = Weight(*shape)


def load_one(
    folder: Path,
    stored: dict[str, Tensor],
    shape: tuple[int, ...],
    quantised: Quantisation | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    save_file(stored, folder / "model.safetensors")
    quantised = quantised or Quantisation()
    with torch.device("meta"):
        model = One(*shape)
    load_weights(model, folder, dtype, torch.device("cpu"), 1, quantised)
    return model.proj.weight.detach()


INT4 = gzip.decompress((Path(__file__).parent / "fixtures" / "int4.safetensors.gz").read_bytes())


@pytest.mark.parametrize(
    ("case", "quantised"),
    [
        ("group_32", Quantisation("compressed-tensors", frozenset({32}), True)),
        ("zero_points", Quantisation("compressed-tensors", frozenset({32}), False)),
        ("channel", Quantisation("compressed-tensors", frozenset({-1}), True)),
        ("awq", Quantisation("awq", frozenset({32}))),
    ],
)
def test_what_the_libraries_write(case: str, quantised: Quantisation, tmp_path: Path) -> None:
    """Packed tensors and dequantised weights as compressed-tensors 0.20.1 and AutoAWQ 0.2.9 made them.

    They come from random matrices; the metadata of the fixture names the functions.
    """
    stored = {
        name.replace(case, "proj"): tensor
        for name, tensor in load(INT4).items()
        if name.startswith(f"{case}.")
    }
    expected = stored.pop("proj.weight")
    loaded = load_one(tmp_path, stored, tuple(expected.shape), quantised)
    assert torch.equal(loaded, expected)


@pytest.mark.parametrize("shape", [(1, 32), (136, 64), (264, 160), (136, 2048)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_once_in_any_shape(
    form: str, shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    encoder, config = FORMS[form]
    if form == "awq" and shape[0] % 8:
        shape = (8, shape[1])  # packed along the outputs
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored, meant = encoder("proj.weight", weight)
    loaded = load_one(tmp_path, stored, shape, quantisation({"quantization_config": config}), dtype)
    assert torch.equal(loaded, meant.to(dtype))


def test_every_fp8_code_and_a_nan(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    scale = torch.tensor([[0.375]])
    finite = torch.where(codes.float().isnan(), 0, codes.float()).to(torch.float8_e4m3fn)
    stored = {"proj.weight": finite, "proj.weight_scale_inv": scale}
    assert torch.equal(load_one(tmp_path, stored, (2, 128)), finite.float() * 0.375)
    with pytest.raises(InputError, match="weight holds NaN, infinity"):
        load_one(tmp_path, stored | {"proj.weight": codes}, (2, 128))


def broken(
    form: str,
    change: Callable[[dict[str, Tensor]], None],
    tmp_path: Path,
    config: dict[str, Any] | None = None,
) -> str:
    """The one line that refuses a checkpoint whose ``mtp.fc_hidden`` is quantised and then changed."""
    encoder, settings = FORMS[form]
    weights = {name: tensor.clone() for name, tensor in tiny_model(seed=3, **SIZES).state_dict().items()}
    stored, _ = encode(weights, r"^mtp\.fc_hidden", encoder)
    change(stored)
    folder = write(tmp_path, stored, settings if config is None else config)
    with pytest.raises(InputError) as caught:
        Qwen4ExpForCausalLM.from_pretrained(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder / 'model.safetensors'}: ", "").replace(f"{folder}: ", "")


def remove(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.__delitem__(f"mtp.fc_hidden.{name}")


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.__setitem__(f"mtp.fc_hidden.{name}", tensor)


ints = partial(torch.zeros, dtype=torch.int32)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("fp8", remove("weight_scale_inv"), "checkpoint lacks mtp.fc_hidden.weight_scale_inv"),
        (
            "fp8",
            put("weight_scale_inv", torch.ones(1, 2)),
            "mtp.fc_hidden.weight_scale_inv has shape [1, 2], expected [2, 2]",
        ),
        (
            "fp8",
            put("weight_scale_inv", torch.ones(2, 2, dtype=torch.int64)),
            "mtp.fc_hidden.weight_scale_inv is I64, expected F32 or BF16 or F16",
        ),
        (
            "fp8",
            put("weight", torch.zeros(160, 160).to(torch.float8_e5m2)),
            "not part of this model: mtp.fc_hidden.weight_scale_inv",
        ),
        (
            "fp8",
            put("weight_scale_inv", torch.full((2, 2), float("nan"))),
            "mtp.fc_hidden.weight holds NaN, infinity, or values too large for torch.float32",
        ),
        ("compressed-tensors", remove("weight_scale"), "checkpoint lacks mtp.fc_hidden.weight_scale"),
        ("compressed-tensors", remove("weight_shape"), "checkpoint lacks mtp.fc_hidden.weight_shape"),
        (
            "compressed-tensors",
            put("weight_g_idx", ints(160)),
            "not part of this model: mtp.fc_hidden.weight_g_idx",
        ),
        (
            "compressed-tensors",
            put("weight_shape", torch.tensor([160, 159])),
            "mtp.fc_hidden.weight_shape says [160, 159], expected [160, 160]",
        ),
        (
            "compressed-tensors",
            put("weight_packed", ints(160, 19)),
            "mtp.fc_hidden.weight_packed has shape [160, 19], expected [160, 20]",
        ),
        (
            "compressed-tensors",
            put("weight_scale", torch.ones(160, 10)),
            "mtp.fc_hidden.weight: 160 inputs have 10 scales, expected one for each 32",
        ),
        (
            "compressed-tensors",
            put("weight_zero_point", ints(20, 5)),
            "mtp.fc_hidden.weight comes with zero points, the config's 'symmetric' says otherwise",
        ),
        (
            "compressed-tensors with zero points",
            remove("weight_zero_point"),
            "mtp.fc_hidden.weight comes without zero points, the config's 'symmetric' says otherwise",
        ),
        (
            "compressed-tensors",
            put("weight", torch.zeros(160, 160)),
            "mtp.fc_hidden.weight is stored twice, as mtp.fc_hidden.weight and mtp.fc_hidden.weight_packed",
        ),
        ("awq", remove("qzeros"), "checkpoint lacks mtp.fc_hidden.qzeros"),
        ("awq", remove("qweight"), "checkpoint lacks mtp.fc_hidden.weight; not part of this model: "),
        (
            "awq",
            put("qweight", ints(20, 160)),
            "mtp.fc_hidden.qweight has shape [20, 160], expected [160, 20]",
        ),
        (
            "awq",
            put("qzeros", ints(4, 20)),
            "mtp.fc_hidden.qzeros has shape [4, 20], expected [5, 20]",
        ),
    ],
)
def test_parts_that_do_not_fit(
    form: str, change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    assert broken(form, change, tmp_path).startswith(message)


def nothing(stored: dict[str, Tensor]) -> None:
    """The checkpoint is as the encoder wrote it."""


@pytest.mark.parametrize(
    ("form", "config", "message"),
    [
        ("awq", {}, "config: quant_method None is not supported"),
        ("awq", {"quant_method": "gptq", "bits": 4}, "config: quant_method 'gptq' is not supported"),
        ("awq", AWQ_CONFIG | {"bits": 8}, "config: bits is 8, only 4 is supported"),
        (
            "awq",
            AWQ_CONFIG | {"version": "gemv"},
            "config: version of AWQ is 'gemv', only 'gemm' is supported",
        ),
        (
            "awq",
            AWQ_CONFIG | {"group_size": "32"},
            "config: group_size is '32', expected a positive integer or -1",
        ),
        (
            "awq",
            AWQ_CONFIG | {"group_size": 64},
            "mtp.fc_hidden.weight: 160 inputs have 5 scales, expected one",
        ),
        ("awq", FP8_CONFIG, "mtp.fc_hidden.qweight is a part of awq, but the quantization_config of"),
        (
            "awq",
            compressed_config(),
            "mtp.fc_hidden.qweight is a part of awq, but the quantization_config of",
        ),
        ("fp8", FP8_CONFIG | {"weight_block_size": None}, "config: weight_block_size is None, expected two"),
        (
            "fp8",
            FP8_CONFIG | {"weight_block_size": [64, 64]},
            "mtp.fc_hidden.weight_scale_inv has shape [2, 2], expected [3, 3]",
        ),
        ("compressed-tensors", compressed_config(num_bits=8), "config: num_bits is 8, only 4 is supported"),
        ("compressed-tensors", compressed_config(type="float"), "config: type of weights is 'float', only"),
        ("compressed-tensors", compressed_config(actorder="group"), "config: actorder 'group' of weights"),
        ("compressed-tensors", compressed_config(False), "mtp.fc_hidden.weight comes without zero points"),
        (
            "compressed-tensors",
            compressed_config() | {"format": "float-quantized"},
            "config: format of compressed-tensors is 'float-quantized', only 'pack-quantized' is supported",
        ),
        ("compressed-tensors", compressed_config() | {"config_groups": []}, "config: config_groups is []"),
    ],
)
def test_configs_that_say_something_else(
    form: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert broken(form, nothing, tmp_path, config).startswith(message)


def test_a_checkpoint_without_a_config_of_its_int4_weights(tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in tiny_model(seed=3, **SIZES).state_dict().items()}
    stored, _ = encode(weights, r"^mtp\.fc_hidden", awq)
    with pytest.raises(InputError, match=r"qweight is a part of awq, but the quantization_config"):
        Qwen4ExpForCausalLM.from_pretrained(write(tmp_path, stored, None))


def test_the_fixture_says_where_it_comes_from() -> None:
    assert b"compressed-tensors 0.20.1" in INT4 and b"AutoAWQ 0.2.9" in INT4
