"""Formats of target and draft side by side: neither notices the other, and none goes without its scales."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from page4.kernels.codecs import decode_kv
from page4.kernels.errors import InputError
from page4.kvcache import FORMAT_NAMES, KVScales, ScalePair, get_format, scale_for_maximum
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment
from tests.kvcache.scenario import SCALES, TOKENS, config, play, qsa_caches, rows_of
from tests.oracle.steps import Stepper
from tests.oracle.tiny import tiny_model


@pytest.mark.parametrize("target", FORMAT_NAMES)
@pytest.mark.parametrize("draft", FORMAT_NAMES)
def test_target_and_draft_choose_their_formats_independently(
    model: Qwen4ExpForCausalLM, target: str, draft: str
) -> None:
    """The target never notices the draft's format, and the draft's logits stay close in any."""
    cache = model.new_cache(config(target, draft))
    assert {c.format.name for c in cache.qsa} == {target}
    assert qsa_caches(cache)[-1].format.name == draft
    target_logits, draft_logits = play(model, cache)
    alone_target, alone_draft = play(model, model.new_cache(config(target)))
    assert torch.equal(target_logits, alone_target)
    assert torch.equal(draft_logits, alone_draft) == (draft == target)
    assert draft_logits.isfinite().all()


def test_a_format_that_is_left_out_is_the_targets(model: Qwen4ExpForCausalLM) -> None:
    assert {c.format.name for c in qsa_caches(model.new_cache(config("e4m3")))} == {"e4m3"}


@pytest.mark.parametrize("kv_format", ["fp32", "fp16"])
def test_formats_without_scales_ignore_those_given(model: Qwen4ExpForCausalLM, kv_format: str) -> None:
    with_scales = play(model, model.new_cache(config(kv_format)))
    without = play(model, model.new_cache(config(kv_format, scales=None)))
    for a, b in zip(with_scales, without, strict=True):
        assert torch.equal(a, b)
    assert {(c.k_scale, c.v_scale) for c in qsa_caches(model.new_cache(config(kv_format)))} == {(1.0, 1.0)}


def test_formats_differ_by_their_rounding_only(model: Qwen4ExpForCausalLM) -> None:
    exact, half, byte = (play(model, model.new_cache(config(f)))[0] for f in ("fp32", "fp16", "e4m3"))
    spread = exact.std()
    assert 0 < (half - exact).std() < 0.001 * spread < (byte - exact).std() < 0.1 * spread


def test_each_mantissa_bit_of_a_byte_halves_the_error(model: Qwen4ExpForCausalLM) -> None:
    """With scales that fit the values, in the layer whose input no quantised attention has touched."""
    cache = model.new_cache(config("fp32"))
    Stepper(model, cache).prefill(TOKENS)
    exact = cache.qsa[0].k_pages
    largest = float(exact.abs().max())

    def error(kv_format: str) -> float:
        scale = scale_for_maximum(largest, get_format(kv_format).max_value)
        pairs = (ScalePair(scale, scale),) * 2
        byte = model.new_cache(config(kv_format, scales=KVScales(pairs, pairs[0])))
        Stepper(model, byte).prefill(TOKENS)
        return float((decode_kv(byte.qsa[0].k_pages, kv_format) * scale - exact).std())

    e5m2, e4m3, e3m4 = (error(name) for name in ("e5m2", "e4m3", "e3m4"))
    assert 1.8 < e5m2 / e4m3 < 2.2
    assert 1.8 < e4m3 / e3m4 < 2.2


def test_bytes_per_token_follow_the_format(model: Qwen4ExpForCausalLM) -> None:
    sizes = {f: model.new_cache(config(f)).qsa[0].k_pages.nbytes for f in FORMAT_NAMES}
    assert sizes["fp32"] == 2 * sizes["fp16"] == 4 * sizes["e4m3"]
    assert sizes["e4m3"] == sizes["e5m2"] == sizes["e3m4"]


def without_draft() -> KVScales:
    return dataclasses.replace(SCALES, draft=None)


@pytest.mark.parametrize(
    ("target", "draft", "scales", "message"),
    [
        ("e4m3", None, None, "KV format e4m3 needs a K and a V scale for each of 2 QSA layers, 0 given"),
        ("e4m3", "fp16", None, "KV format e4m3 needs a K and a V scale for each of 2 QSA layers, 0 given"),
        ("e4m3", None, KVScales(SCALES.target[:1], SCALES.draft), "for each of 2 QSA layers, 1 given"),
        ("e4m3", None, KVScales(SCALES.target * 2, SCALES.draft), "for each of 2 QSA layers, 4 given"),
        ("e4m3", None, without_draft(), "draft KV format e4m3 needs its own K and V scale, none given"),
        ("fp16", "e4m3", without_draft(), "draft KV format e4m3 needs its own K and V scale, none given"),
        ("fp16", "e4m3", None, "draft KV format e4m3 needs its own K and V scale, none given"),
        ("fp16", "e5m2", None, "draft KV format e5m2 needs its own K and V scale, none given"),
        ("int8", None, SCALES, "KV format 'int8' is unknown"),
        ("fp16", "int8", SCALES, "KV format 'int8' is unknown"),
    ],
)
def test_a_missing_scale_is_refused_never_taken_for_one(
    model: Qwen4ExpForCausalLM, target: str, draft: str | None, scales: KVScales | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        model.new_cache(config(target, draft, scales))


@pytest.mark.parametrize(
    ("target", "draft", "scales"),
    [
        ("e4m3", "fp16", without_draft()),
        ("fp16", "e4m3", KVScales((), SCALES.draft)),
        ("fp16", None, None),
    ],
)
def test_only_the_scales_in_use_are_needed(
    model: Qwen4ExpForCausalLM, target: str, draft: str | None, scales: KVScales | None
) -> None:
    model.new_cache(config(target, draft, scales))


def test_every_layer_gets_its_own_scales(model: Qwen4ExpForCausalLM) -> None:
    pairs = [ScalePair(c.k_scale, c.v_scale) for c in qsa_caches(model.new_cache(config("e4m3")))]
    assert pairs == [*SCALES.target, SCALES.draft]


def test_a_power_of_two_in_the_scale_changes_nothing(model: Qwen4ExpForCausalLM) -> None:
    """The K scale folds into the softmax scale and the V scale into the output, each exactly once."""

    def scaled(by: float) -> KVScales:
        pairs = [ScalePair(0.01 * by, 0.01 * by)] * 3
        return KVScales(tuple(pairs[:2]), pairs[2])

    plain = play(model, model.new_cache(config("e4m3", scales=scaled(1))))
    doubled = play(model, model.new_cache(config("e4m3", scales=scaled(4))))
    for a, b in zip(plain, doubled, strict=True):
        assert (a - b).abs().max() <= 1e-4


def test_stored_bytes_are_e4m3_of_the_value_over_the_scale(model: Qwen4ExpForCausalLM) -> None:
    """For the layers whose input no quantised attention has touched: the first QSA layer and the draft's."""
    scales = ScalePair(0.0031, 0.0017)  # small enough that the largest values saturate
    exact = Stepper(model, model.new_cache(config("fp32")))
    byte = Stepper(model, model.new_cache(config("e4m3", scales=KVScales((scales,) * 2, scales))))
    rows = len(TOKENS) - 1
    streams = exact.prefill(TOKENS[:rows])
    byte.prefill(TOKENS[:rows])
    for stepper in (exact, byte):
        segment = Segment(stepper.request, 0, torch.tensor(TOKENS[1:]), (), decode=False)
        model.draft_rows(RowBatch.pack([segment], model.device), streams, stepper.cache)
    saturated = 0
    for layer in (0, 2):
        exact_layer, byte_layer = qsa_caches(exact.cache)[layer], qsa_caches(byte.cache)[layer]
        for pages, stored, scale in (
            (exact_layer.k_pages, byte_layer.k_pages, scales.k),
            (exact_layer.v_pages, byte_layer.v_pages, scales.v),
        ):
            scaled = (rows_of(pages, exact, rows) / torch.tensor(scale)).clamp(-448, 448)
            expected = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
            assert torch.equal(rows_of(stored, byte, rows), expected)
            saturated += int((scaled.abs() == 448).sum())
    assert saturated > 0


def test_a_model_without_a_draft_layer_needs_no_draft_scale() -> None:
    bare = tiny_model(mtp_num_hidden_layers=0)
    cache = bare.new_cache(config("e4m3", scales=without_draft()))
    assert cache.draft is None
