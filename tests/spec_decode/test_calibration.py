"""Calibrated scales map the largest |K| and |V| of each layer onto the format's largest value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from page4.kernels.errors import InputError
from page4.kvcache import KVScales, ScalePair
from page4.kvcache.cache import QSALayerCache
from page4.kvcache.intervention import LinearStorage
from page4.kvcache.scales import UNIT_SCALES
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment
from page4.model.qsa import QSAttention
from page4.spec_decode import (
    DecoderConfig,
    KVObserver,
    SpeculativeDecoder,
    calibrate_scales,
    generate,
    observe_texts,
)
from tests.oracle.steps import exact_cache
from tests.oracle.tiny import random_tokens, tiny_model

TEXTS = [random_tokens(length, seed) for seed, length in ((41, 50), (42, 33))]


def captured_maxima(model: Qwen4ExpForCausalLM, text: list[int]) -> list[tuple[float, float]]:
    """Largest |K| and |V| per QSA layer, then of the MTP layer: projections caught by hooks in one full pass.

    K is normalised and rotated here by the textbook formulas in float64.
    """
    projected: dict[tuple[int, str], Tensor] = {}
    layers = [m for m in model.modules() if isinstance(m, QSAttention)]
    hooks = []
    for i, layer in enumerate(layers):
        for name, projection in (("k", layer.k_proj), ("v", layer.v_proj)):

            def keep(_: nn.Module, __: object, output: Tensor, key: tuple[int, str] = (i, name)) -> None:
                projected[key] = output.double()

            hooks.append(projection.register_forward_hook(keep))
    try:
        streams = model(torch.tensor([text])).streams[0]
        cache = exact_cache(model)
        request = cache.open()
        cache.reserve(request, len(text))
        if model.mtp is not None:
            segment = Segment(request, 0, torch.tensor(text[1:]), (), decode=False)
            model.draft_rows(RowBatch.pack([segment], model.device), streams[:-1], cache)
    finally:
        for hook in hooks:
            hook.remove()
    maxima = []
    for i, layer in enumerate(layers):
        k = projected[i, "k"].unflatten(-1, (layer.kv_heads, layer.head_dim))
        k = k / (k.square().mean(-1, keepdim=True) + layer.eps).sqrt() * (1 + layer.k_norm.weight.double())
        maxima.append((largest(rotate(k, model)), largest(projected[i, "v"])))
    return maxima


def rotate(k: Tensor, model: Qwen4ExpForCausalLM) -> Tensor:
    """Rotary embedding ``[T, H, D]``: pair (i, i + half) turns by ``p * theta^(-i / half)``."""
    half = model.config.rotary_dim // 2
    frequency = model.config.rope_theta ** (-torch.arange(half).double() / half)
    angle = (torch.arange(k.shape[0]).double()[:, None] * frequency)[:, None]
    a, b = k[..., :half], k[..., half : 2 * half]
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat([*turned, k[..., 2 * half :]], dim=-1)


def largest(x: Tensor) -> float:
    return float(x.abs().max())


def pairs(scales: KVScales) -> list[ScalePair]:
    return [*scales.target, *([scales.draft] if scales.draft else [])]


@pytest.mark.parametrize("chunk", [16, 2048])
def test_scales_are_the_maxima_over_all_texts(chunk: int) -> None:
    model = tiny_model(seed=6)
    maxima = [captured_maxima(model, text) for text in TEXTS]
    scales = pairs(calibrate_scales(model, TEXTS, prefill_chunk=chunk))
    assert len(scales) == 3
    for layer, scale in enumerate(scales):
        k, v = (max(m[layer][i] for m in maxima) for i in range(2))
        # The cache observed is FP16.
        assert scale.k * 448 == pytest.approx(k, rel=2e-3)
        assert scale.v * 448 == pytest.approx(v, rel=2e-3)


def test_more_texts_never_lower_a_scale() -> None:
    model = tiny_model(seed=6)
    one, both = (pairs(calibrate_scales(model, texts)) for texts in (TEXTS[:1], TEXTS))
    assert all(a.k <= b.k and a.v <= b.v for a, b in zip(one, both, strict=True))
    assert one != both


def test_no_value_of_the_calibration_texts_saturates() -> None:
    """Twice the scale would lose a bit of range; half would clip."""
    model = tiny_model(seed=6)
    scales = calibrate_scales(model, TEXTS[:1])
    decoder = SpeculativeDecoder(model, DecoderConfig(kv_format="e4m3", scales=scales, max_length=64))
    request = decoder.open(TEXTS[0])
    decoder.prefill({request: len(TEXTS[0])})
    first = decoder.cache.qsa[0]
    for pages in (first.k_pages, first.v_pages):
        magnitude = pages & 0x7F
        assert magnitude.max() == 0x7E, "the largest value is stored as 448"
        assert (magnitude == 0x7E).sum() <= 2


def test_scales_that_are_computed_need_no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(seed=6)
    monkeypatch.setattr(Qwen4ExpForCausalLM, "forward_rows", None)  # nothing is run
    assert calibrate_scales(model, TEXTS, kv_format="int8") == KVScales((), None)


@pytest.mark.parametrize("kv_format", ["e4m3", "int8"])
def test_a_decoder_takes_the_scales_of_its_format(kv_format: str) -> None:
    model = tiny_model(seed=6)
    scales = calibrate_scales(model, TEXTS, kv_format)
    config = DecoderConfig(kv_format=kv_format, scales=scales, max_length=64)
    generations, _ = generate(SpeculativeDecoder(model, config), [TEXTS[0]], 5)
    assert len(generations[0].tokens) == 5


def test_a_model_without_a_head_has_no_draft_scales() -> None:
    scales = calibrate_scales(tiny_model(seed=6, mtp_num_hidden_layers=0), TEXTS)
    assert len(scales.target) == 2
    assert scales.draft is None


def test_wrong_input_is_refused() -> None:
    model = tiny_model(seed=6)
    with pytest.raises(InputError, match="KV format 'int4' is unknown"):
        calibrate_scales(model, TEXTS, kv_format="int4")
    with pytest.raises(InputError, match="there are no texts"):
        calibrate_scales(model, [])
    with pytest.raises(InputError, match="the model's positions end at 4096"):
        calibrate_scales(model, [[1] * 4097])


def test_observations_of_texts_sum_and_know_their_heads() -> None:
    model = tiny_model(seed=6)
    one, two, both = (observe_texts(model, texts) for texts in (TEXTS[:1], TEXTS[1:], TEXTS))
    assert list(both.layers) == ["2", "3", "draft"]
    for name, pair in (one + two).layers.items():
        for summed, whole in zip(pair, both.layers[name], strict=True):
            assert (summed.counts == whole.counts).all()
            assert len(whole.heads) == 2 and max(head.maximum for head in whole.heads) == whole.maximum
            rows = sum(len(text) - (name == "draft") for text in TEXTS)
            assert whole.total == rows * 2 * 32


def test_nothing_but_the_text_is_observed() -> None:
    """Neither what ran before to warm up, nor pages of others, nor slots beyond the text."""
    model = tiny_model(seed=6)
    alone = observe_texts(model, TEXTS[1:])
    observer = KVObserver(model, longest=60)
    observer.observe(random_tokens(60, seed=9))
    cache = observer._decoder.cache
    assert isinstance(cache.draft.mixer, QSALayerCache)  # type: ignore[union-attr]
    for layer in (*cache.qsa, cache.draft.mixer):  # type: ignore[union-attr]
        layer.k_pages.fill_(torch.nan)
        layer.v_pages.fill_(torch.inf)
    observed = observer.observe(TEXTS[1])
    for name, pair in observed.layers.items():
        for found, expected in zip(pair, alone.layers[name], strict=True):
            assert (found.counts == expected.counts).all()


def test_an_observer_frees_what_it_took_even_when_it_refuses() -> None:
    model = tiny_model(seed=6)
    observer = KVObserver(model, longest=50)
    model.model.layers[2].self_attn.v_proj.weight.mul_(1e8)  # type: ignore[union-attr, operator, operator]
    for _ in range(3):  # there is one row
        with pytest.raises(InputError, match="V of layer 2 hold NaN, infinity or more than FP16 can"):
            observer.observe(TEXTS[0])


def test_a_text_of_one_token_has_no_rows_in_the_draft_layer() -> None:
    observed = observe_texts(tiny_model(seed=6), [[5]])
    assert [pair[0].total for pair in observed.layers.values()] == [64, 64, 0]


def test_rules_and_formats_differ() -> None:
    observed = observe_texts(tiny_model(seed=6), TEXTS)
    assert pairs(observed.scales("e4m3", "percentile", 90))[0].k < pairs(observed.scales("e4m3"))[0].k
    ratio = pairs(observed.scales("e4m3"))[0].k / pairs(observed.scales("e5m2"))[0].k
    assert ratio == pytest.approx(57344 / 448)
    for name in ("fp16", "int8"):
        with pytest.raises(InputError, match="has no static scales to calibrate"):
            observed.scales(name)
    with pytest.raises(InputError, match="different layers or heads"):
        observed + observe_texts(tiny_model(seed=6, mtp_num_hidden_layers=0), TEXTS)


def test_formats_by_layer_get_the_scales_of_their_layers() -> None:
    """The tiny model's QSA layers are 2 and 3."""
    observation = observe_texts(tiny_model(seed=5), TEXTS[:1])
    e4m3, e3m4 = (observation.scales(name) for name in ("e4m3", "e3m4"))
    mixed = observation.scales_for("e4m3,3:e3m4", "e3m4")
    assert mixed == KVScales((e4m3.target[0], e3m4.target[1]), e3m4.draft)
    assert observation.scales_for("fp16,3:e4m3", "fp16") == KVScales((UNIT_SCALES, e4m3.target[1]), None)
    assert observation.scales_for("e4m3,2:int8") == KVScales((UNIT_SCALES, e4m3.target[1]), e4m3.draft)
    assert observation.scales_for("int8", "fp16") is None
    assert observation.scales_for("e4m3", rule="mse") != observation.scales_for("e4m3")
    with pytest.raises(InputError, match="names layer 1; the QSA layers are 2, 3"):
        observation.scales_for("e4m3,1:fp16")


def test_what_is_counted_is_what_an_intervention_stores() -> None:
    model = tiny_model(seed=5)
    doubled = LinearStorage(k=2 * torch.eye(model.config.head_dim).expand(2, -1, -1))
    plain = observe_texts(model, TEXTS[:1])
    changed = observe_texts(model, TEXTS[:1], interventions={2: doubled})
    (k, v), (changed_k, changed_v) = plain.layers["2"], changed.layers["2"]
    assert changed_k.maximum == 2 * k.maximum and changed_v.maximum == v.maximum
    assert changed.layers["3"][0].maximum == pytest.approx(plain.layers["3"][0].maximum, rel=2e-3)
