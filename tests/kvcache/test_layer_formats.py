"""Formats by layer: how they are written, which layers they mean, and whose scales each layer gets."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from page4.kernels.errors import InputError
from page4.kvcache import KVScales, LayerFormats, ScalePair, get_format
from page4.kvcache.layer_formats import draft_format, scales_of
from page4.kvcache.scales import UNIT_SCALES
from page4.model import Qwen4ExpForCausalLM
from tests.kvcache.scenario import SCALES, config, play, qsa_caches

QSA_LAYERS = (2, 3)
"""Of the tiny model."""


def names(text: str, layers: tuple[int, ...] = QSA_LAYERS) -> list[str]:
    return [used.name for used in LayerFormats(text).of(layers)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("e4m3", ["e4m3", "e4m3"]),
        ("e4m3,2:fp16", ["fp16", "e4m3"]),
        ("e4m3,3:int8", ["e4m3", "int8"]),
        ("fp16,3:e3m4,2:e5m2", ["e5m2", "e3m4"]),
    ],
)
def test_exceptions_are_named_by_the_models_layer(text: str, expected: list[str]) -> None:
    assert names(text) == expected


def test_the_draft_takes_the_default_and_never_an_exception() -> None:
    target = LayerFormats("e4m3,2:fp16,3:fp16")
    assert draft_format(target, None).name == "e4m3"
    assert draft_format(target, "int8").name == "int8"
    assert target.names == ["e4m3", "fp16"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "KV format '' is unknown"),
        ("e9m9,2:fp16", "KV format 'e9m9' is unknown, expected one of fp32"),
        ("e4m3,2:e9m9", "KV format 'e9m9' is unknown"),
        ("e4m3,fp16", "KV format 'e4m3,fp16': 'fp16' is not layer:format, as in e4m3,3:fp16"),
        ("e4m3,", "'' is not layer:format"),
        ("e4m3,-1:fp16", "'-1:fp16' is not layer:format"),
        ("e4m3,\u0662:fp16", "'\u0662:fp16' is not layer:format"),
        ("e4m3, 2:fp16", "' 2:fp16' is not layer:format"),
        ("e4m3,2:fp16,2:int8", "names layer 2 twice"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        LayerFormats(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_layer_without_kv_is_refused_by_its_number(model: Qwen4ExpForCausalLM) -> None:
    message = "KV format 'e4m3,1:fp16' names layer 1; the QSA layers are 2, 3"
    with pytest.raises(InputError, match=message):
        LayerFormats("e4m3,1:fp16").of(QSA_LAYERS)
    with pytest.raises(InputError, match=message):
        model.new_cache(config("e4m3,1:fp16", "fp16"))


def scaled(value: float) -> KVScales:
    return KVScales((ScalePair(value, value + 1), ScalePair(value + 2, value + 3)), ScalePair(value, value))


def test_every_layer_gets_the_scales_of_its_own_format() -> None:
    by_format = {"e4m3": scaled(10), "e3m4": scaled(20)}

    def scales(text: str, draft: str) -> KVScales | None:
        return scales_of(LayerFormats(text), get_format(draft), QSA_LAYERS, by_format)

    assert scales("e4m3,3:e3m4", "e3m4") == KVScales(
        (by_format["e4m3"].target[0], by_format["e3m4"].target[1]), by_format["e3m4"].draft
    )
    assert scales("fp16,3:e4m3", "fp16") == KVScales((UNIT_SCALES, by_format["e4m3"].target[1]), None)
    assert scales("fp16", "e4m3") == KVScales((), by_format["e4m3"].draft)
    assert scales("int8,2:fp16", "fp16") is None


def test_layers_of_a_cache_differ_in_storage_and_scales(model: Qwen4ExpForCausalLM) -> None:
    cache = model.new_cache(dataclasses.replace(config("e4m3", "fp16"), kv_format="e4m3,3:int8"))
    first, second, draft = qsa_caches(cache)
    assert (first.format.name, second.format.name, draft.format.name) == ("e4m3", "int8", "fp16")
    assert (ScalePair(first.k_scale, first.v_scale), ScalePair(second.k_scale, second.v_scale)) == (
        SCALES.target[0],
        UNIT_SCALES,
    )
    assert first.k_token_scales is None and second.k_token_scales is not None


def test_a_layers_format_changes_what_comes_after_it_and_nothing_before(model: Qwen4ExpForCausalLM) -> None:
    """The K/V of the first layer are the same bytes whatever the second stores; logits are not."""
    _, second = QSA_LAYERS

    def run(text: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        cache = model.new_cache(config(text, "fp32"))
        target, _ = play(model, cache)
        return [layer.k_pages for layer in cache.qsa], target

    exact, mixed, byte = run("fp32"), run(f"fp32,{second}:e4m3"), run("e4m3")
    assert torch.equal(mixed[0][0], exact[0][0]) and mixed[0][1].dtype == torch.uint8
    errors = [float((logits - exact[1]).abs().mean()) for _, logits in (mixed, byte)]
    assert 0 < errors[0] < errors[1]
    early, _ = run(f"e4m3,{second}:fp32")
    assert torch.equal(early[0], byte[0][0])
