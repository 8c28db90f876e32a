"""Reading ``config.json``: every published spelling is understood, everything wrong is one clear line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from page4.kernels.errors import InputError
from page4.model import Qwen4ExpConfig
from tests.oracle.tiny import tiny_dict

READ = sorted({f.name for f in dataclasses.fields(Qwen4ExpConfig)} - {"raw"})


def parse(**overrides: Any) -> Qwen4ExpConfig:
    return Qwen4ExpConfig.from_dict(tiny_dict(**overrides))


def without(*names: str) -> dict[str, Any]:
    return {k: v for k, v in tiny_dict().items() if k not in names}


def test_fields_of_a_text_config() -> None:
    config = parse()
    assert config.hidden_size == 48
    assert config.layer_types == ("linear_attention",) * 2 + ("qsa_attention",) * 2
    assert config.qsa_layers == (2, 3)
    assert (config.rope_theta, config.partial_rotary_factor, config.rotary_dim) == (10_000.0, 0.25, 8)
    assert config.block_topk == 4
    assert config.stream_size == 4 * 48
    assert config.raw["bos_token_id"] == 0


def test_the_multimodal_wrapper_nests_the_text_config() -> None:
    wrapped = {"model_type": "qwen4_exp", "text_config": tiny_dict(), "vision_config": {"depth": 27}}
    assert Qwen4ExpConfig.from_dict(wrapped) == parse()


@pytest.mark.parametrize("spelling", ["full_attention", "qwen_sparse_attention", "indexed_attention"])
def test_all_spellings_of_a_sparse_layer(spelling: str) -> None:
    assert parse(layer_types=["linear_attention"] * 3 + [spelling]).qsa_layers == (3,)


@pytest.mark.parametrize(("interval", "layers"), [(None, (3, 7)), (2, (1, 3, 5, 7)), (3, (2, 5))])
def test_layer_types_left_out_are_one_sparse_layer_per_interval(
    interval: int | None, layers: tuple[int, ...]
) -> None:
    values = without("layer_types") | {"num_hidden_layers": 8, "ple_layer_ids": [1]}
    if interval is not None:
        values["full_attention_interval"] = interval
    assert Qwen4ExpConfig.from_dict(values).qsa_layers == layers


def test_the_first_of_several_eos_tokens_cuts_n_grams() -> None:
    assert parse(eos_token_id=[5, 9]).eos_token_id == 5


def test_rope_fields_may_stand_at_the_top() -> None:
    values = without("rope_parameters") | {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    config = Qwen4ExpConfig.from_dict(values)
    assert (config.rope_theta, config.rotary_dim) == (5e5, 16)


def test_defaults_of_fields_that_exports_leave_out() -> None:
    optional = ("seed", "rms_norm_eps", "norm_topk_prob", "tie_word_embeddings", "mtp_num_hidden_layers")
    config = Qwen4ExpConfig.from_dict(without(*optional))
    assert [getattr(config, name) for name in optional] == [1234, 1e-6, True, False, 1]


def test_ple_layers_are_a_sorted_set() -> None:
    assert parse(ple_layer_ids=[2, 1, 2]).ple_layer_ids == (1, 2)
    assert parse(ple_layer_ids=None).ple_layer_ids == ()


@pytest.mark.parametrize("name", ["hidden_size", "indexer_budget", "hc_lowrank", "eos_token_id"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"config: missing {name}"):
        Qwen4ExpConfig.from_dict(without(name))


def test_all_missing_fields_are_named_at_once() -> None:
    with pytest.raises(
        InputError, match=r"missing hidden_size, head_dim, rope_theta, partial_rotary_factor$"
    ):
        Qwen4ExpConfig.from_dict(without("hidden_size", "head_dim", "rope_parameters"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'qwen4_exp'"),
        ({"output_gate_type": "silu"}, "output_gate_type is 'silu', expected 'sigmoid'"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2, expected 1"),
        ({"layer_types": ["linear_attention"] * 3 + ["mamba"]}, "layer type 'mamba' is unknown"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"num_attention_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads must be a multiple"),
        ({"indexer_budget": 18}, "indexer_budget must be a multiple of indexer_compress_ratio"),
        ({"indexer_budget": 18, "indexer_compress_ratio": 3}, "3 does not divide the 16-token page"),
        ({"indexer_head_dim": 6}, "rotary dimension 8 must be even and at most indexer_head_dim 6"),
        ({"hc_count": 1}, "hc_count is 1, expected an integer of at least 2"),
        ({"ngram_size": 1}, "ngram_size is 1, expected an integer of at least 2"),
        ({"ple_embed_dim": 30}, "ple_embed_dim must be a multiple"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids are one-indexed"),
        ({"ple_layer_ids": [3]}, "must name linear_attention layers"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers must be 0 or 1"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be between 1 and num_experts"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected an integer of at least 1"),
        ({"vocab_size": "128"}, "vocab_size is '128', expected an integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default', expected a JSON object"),
        ({"ple_layer_ids": 2}, "ple_layer_ids is 2, expected a list of int"),
        ({"text_config": [1]}, "text_config is .*, expected a JSON object"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_named_with_what_would_be_right(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse(**overrides)
    assert "\n" not in str(caught.value)


JUNK: tuple[Any, ...] = (None, "x", "", -1, 0, 1.5, True, float("inf"), [], ["x"], [None], {}, {"a": 1})
OTHERS = ("rope_parameters", "text_config", "model_type", "full_attention_interval")


@pytest.mark.parametrize("name", [*READ, *OTHERS])
def test_junk_in_any_field_is_refused_or_read_but_never_a_crash(name: str) -> None:
    for junk in JUNK:
        values = tiny_dict() | {name: junk}
        if name == "full_attention_interval":
            del values["layer_types"]
        try:
            config = Qwen4ExpConfig.from_dict(values)
        except InputError as error:
            assert str(error).startswith("config: ")
            assert "\n" not in str(error)
        else:
            assert config.rotary_dim > 0


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_dict()), encoding="utf-8")
    assert Qwen4ExpConfig.from_file(path) == parse()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1]", "expected a JSON object"),
    ],
    ids=["missing", "truncated", "binary", "list"],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        Qwen4ExpConfig.from_file(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)
