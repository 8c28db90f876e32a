"""Formats of target and draft side by side: neither notices the other, and none goes without its scales."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from page4.kernels.codecs import decode_kv
from page4.kernels.errors import InputError
from page4.kvcache import FORMAT_NAMES, KVScales, ScalePair, get_format, scale_for_maximum
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment
from page4.model.qsa import QSAttention
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

    dynamic = model.new_cache(config("int8"))
    Stepper(model, dynamic).prefill(TOKENS)
    assert dynamic.qsa[0].k_token_scales is not None
    int8 = decode_kv(dynamic.qsa[0].k_pages, "int8") * dynamic.qsa[0].k_token_scales[..., None]

    e5m2, e4m3, e3m4 = (error(name) for name in ("e5m2", "e4m3", "e3m4"))
    assert 1.8 < e5m2 / e4m3 < 2.2
    assert 1.8 < e4m3 / e3m4 < 2.2
    assert (int8 - exact).std() < e3m4


def test_bytes_per_token_follow_the_format(model: Qwen4ExpForCausalLM) -> None:
    """Scales per token count: int8 takes 1 + 4 / head_dim bytes a value."""
    sizes = {f: model.new_cache(config(f)).qsa[0].kv_bytes_per_token for f in FORMAT_NAMES}
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    assert sizes["fp32"] == 2 * sizes["fp16"] == 4 * sizes["e4m3"]
    assert sizes["e4m3"] == sizes["e5m2"] == sizes["e3m4"] == 2 * heads * dim
    assert sizes["int8"] == 2 * heads * dim * (1 + 4 / dim)
    for name, size in sizes.items():
        kv_format = get_format(name)
        assert size == 2 * heads * (dim * kv_format.bytes_per_value + kv_format.scale_bytes)


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
        ("int8", "e4m3", None, "draft KV format e4m3 needs its own K and V scale, none given"),
        ("e4m3", "int8", None, "KV format e4m3 needs a K and a V scale for each of 2 QSA layers, 0 given"),
        ("int4", None, SCALES, "KV format 'int4' is unknown"),
        ("fp16", "int4", SCALES, "KV format 'int4' is unknown"),
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
        ("int8", None, None),
        ("int8", None, KVScales(())),
        ("int8", "e4m3", KVScales((), SCALES.draft)),
        ("e4m3", "int8", without_draft()),
    ],
)
def test_only_the_scales_in_use_are_needed(
    model: Qwen4ExpForCausalLM, target: str, draft: str | None, scales: KVScales | None
) -> None:
    model.new_cache(config(target, draft, scales))


@pytest.mark.parametrize(
    ("target", "draft", "scales", "message"),
    [
        ("int8", None, SCALES, "KV format int8 computes a scale per token and KV head: leave out"),
        ("int8", "e4m3", SCALES, "KV format int8 computes a scale"),
        ("int8", None, KVScales((), SCALES.draft), "draft KV format int8 computes a scale"),
        ("e4m3", "int8", SCALES, "draft KV format int8 computes a scale"),
    ],
)
def test_static_scales_are_refused_where_scales_are_computed(
    model: Qwen4ExpForCausalLM, target: str, draft: str | None, scales: KVScales, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        model.new_cache(config(target, draft, scales))
    assert "\n" not in str(caught.value)


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


def test_int8_stores_codes_and_scales_of_each_token_and_head(model: Qwen4ExpForCausalLM) -> None:
    """In the same slots; for the layers whose input no quantised attention has touched."""
    exact = Stepper(model, model.new_cache(config("fp32")))
    byte = Stepper(model, model.new_cache(config("int8")))
    rows = len(TOKENS) - 1
    streams = exact.prefill(TOKENS[:rows])
    byte.prefill(TOKENS[:rows])
    for stepper in (exact, byte):
        segment = Segment(stepper.request, 0, torch.tensor(TOKENS[1:]), (), decode=False)
        model.draft_rows(RowBatch.pack([segment], model.device), streams, stepper.cache)
    for layer in (0, 2):
        values, stored = qsa_caches(exact.cache)[layer], qsa_caches(byte.cache)[layer]
        for pages, codes, scales in (
            (values.k_pages, stored.k_pages, stored.k_token_scales),
            (values.v_pages, stored.v_pages, stored.v_token_scales),
        ):
            x = rows_of(pages, exact, rows)  # [rows, Hkv, D]
            expected = x.abs().amax(-1) / torch.tensor(127.0)
            assert scales is not None
            assert torch.equal(rows_of(scales, byte, rows), expected)
            signed = rows_of(codes, byte, rows).view(torch.int8)
            assert torch.equal(signed, (x / expected[..., None]).round().to(torch.int8))
            assert expected.unique().numel() == expected.numel(), "no two rows share a scale"


def test_int8_rows_of_zeros_are_zeros_with_a_finite_scale() -> None:
    """A layer that projects to nothing: K and V of 0 decode to 0, and attention over them gives 0."""
    silent = tiny_model(seed=2)
    for layer in (m for m in silent.modules() if isinstance(m, QSAttention)):
        layer.k_proj.weight.zero_()
        layer.v_proj.weight.zero_()
    exact, byte = (Stepper(silent, silent.new_cache(config(f))) for f in ("fp32", "int8"))
    assert torch.equal(byte.prefill(TOKENS[:40]), exact.prefill(TOKENS[:40]))
    layer = byte.cache.qsa[0]
    for codes, scales in ((layer.k_pages, layer.k_token_scales), (layer.v_pages, layer.v_token_scales)):
        assert scales is not None
        written = rows_of(scales, byte, 40)
        assert (written.isfinite() & (written > 0)).all()
        assert not rows_of(codes, byte, 40).any()


def test_a_model_without_a_draft_layer_needs_no_draft_scale() -> None:
    bare = tiny_model(mtp_num_hidden_layers=0)
    cache = bare.new_cache(config("e4m3", scales=without_draft()))
    assert cache.draft is None
