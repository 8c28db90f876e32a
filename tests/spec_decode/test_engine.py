"""The steps of speculative decoding: what the draft layer proposes and what its cache holds afterwards."""

from __future__ import annotations

import pytest
import torch

from page4.kernels.errors import InputError
from page4.kvcache.cache import QSALayerCache
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import DecoderConfig, Phase, Request, SpeculativeDecoder
from tests.oracle.tiny import random_tokens, tiny_model
from tests.spec_decode.conftest import Build, Forcing
from tests.spec_decode.reference import naive_drafts, safe_prompt


def start(decoder: SpeculativeDecoder, prompt: tuple[int, ...]) -> Request:
    """A request after its prefill and the first step, which drafts."""
    request = decoder.open(prompt)
    while request.computed < request.prompt_length - 1:
        stop = min(request.computed + decoder.config.prefill_chunk, request.prompt_length - 1)
        decoder.prefill({request: stop})
    decoder.start(request)
    step(decoder, request)
    return request


def step(decoder: SpeculativeDecoder, *requests: Request) -> None:
    decoder.collect(decoder.launch(requests))


def drafts(decoder: SpeculativeDecoder, request: Request) -> list[int]:
    """What the next step verifies."""
    return decoder.state.drafts[request.row].tolist()


@pytest.mark.parametrize("chunk", [5, 16, 64])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_drafts_are_those_of_the_head_run_from_nothing(
    model: Qwen4ExpForCausalLM, decoder: Build, num_draft_tokens: int, chunk: int
) -> None:
    """After the prefill and after every step, whatever was accepted: no stale row is ever read."""
    engine = decoder(num_draft_tokens, prefill_chunk=chunk)
    request = start(engine, safe_prompt(model, 27, 24))
    for _ in range(6):
        assert drafts(engine, request) == naive_drafts(model, request.tokens, num_draft_tokens)
        step(engine, request)
    assert len(set(request.accepted)) > 1


@pytest.mark.parametrize("num_draft_tokens", range(1, 6))
def test_draft_rows_of_rejected_tokens_are_written_again(
    model: Qwen4ExpForCausalLM, decoder: Build, force_drafts: Forcing, num_draft_tokens: int
) -> None:
    """After many verifications the draft layer's cache is the one that teacher forcing gives (vllm#14649).

    Every row holds K, V and index keys computed from the target's own streams and the accepted tokens: none
    from a rejected draft, and none from the head's own streams.
    """
    prompt = safe_prompt(model, 27, 24)
    force_drafts([prompt], lambda step: (0, num_draft_tokens, 1)[step % 3])
    engine = decoder(num_draft_tokens)
    request = start(engine, prompt)
    while len(request.emitted) < 20:
        step(engine, request)
    assert {0, num_draft_tokens} <= set(request.accepted)

    forced = decoder(num_draft_tokens, prefill_chunk=128)
    known = request.computed
    fresh = forced.open(request.tokens[: known + 1])
    forced.prefill({fresh: known})

    ours, theirs = draft_layer(engine), draft_layer(forced)
    for a, b in zip(stored(ours, request.row, known), stored(theirs, fresh.row, known), strict=True):
        assert (a - b).abs().max() <= 1e-4


def draft_layer(decoder: SpeculativeDecoder) -> QSALayerCache:
    layer = decoder.cache.draft
    assert layer is not None and isinstance(layer.mixer, QSALayerCache)
    return layer.mixer


def stored(layer: QSALayerCache, row: int, length: int) -> list[torch.Tensor]:
    """K, V, complete blocks and open raw keys of a request's first ``length`` rows."""
    pages = layer.pages(torch.tensor([row]), length)
    slots = pages.slots(torch.arange(length)[None])[0]
    blocks = layer.compressed_pages[pages.tables[0]].flatten(0, 1)[: length // 4]
    open_block = torch.arange(length - length % 4 - 4, length)  # with the last complete one, so never empty
    ring = layer.ring[row, open_block % layer.ring.shape[1]]
    return [*(p[slots // 16, :, slots % 16] for p in (layer.k_pages, layer.v_pages)), blocks, ring]


def test_a_batch_drafts_what_each_request_drafts_alone(model: Qwen4ExpForCausalLM, decoder: Build) -> None:
    engine = decoder(3, max_requests=3)
    requests = [start(engine, safe_prompt(model, length, 24)) for length in (3, 17, 30)]
    for _ in range(4):
        for request in requests:
            assert drafts(engine, request) == naive_drafts(model, request.tokens, 3)
        step(engine, *requests)


def test_host_and_device_agree_how_far_a_request_is(model: Qwen4ExpForCausalLM, decoder: Build) -> None:
    engine = decoder(3)
    request = start(engine, safe_prompt(model, 27, 24))
    assert request.accepted == [], "the first step had nothing to verify"
    for _ in range(5):
        assert request.computed == len(request.tokens) - 1, "all but the newest token"
        before = len(request.tokens)
        step(engine, request)
        state = engine.state.of(torch.tensor([request.row]))
        assert int(state.computed) == request.computed
        assert int(state.tokens[0, 0]) == request.tokens[-1]
        assert state.history[0].tolist() == request.tokens[-3:-1]
        assert int(state.read_slots) == request.accepted[-1]
        assert len(request.tokens) == before + request.accepted[-1] + 1
    engine.close(request)
    assert request.phase is Phase.FINISHED


def test_decoding_starts_where_the_prefill_ends(decoder: Build) -> None:
    engine = decoder(3)
    request = engine.open([1, 2, 3])
    engine.prefill({request: 1})
    with pytest.raises(RuntimeError, match="1 of 3 tokens are prefilled"):
        engine.start(request)


def test_a_decoder_without_speculation_never_runs_the_head(
    model: Qwen4ExpForCausalLM, decoder: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen4ExpForCausalLM, "draft_rows", None)
    engine = decoder(0)
    request = start(engine, safe_prompt(model, 27, 24))
    assert drafts(engine, request) == []
    step(engine, request)
    assert len(request.emitted) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 8}, "num_draft_tokens is 8, expected 0 to 7"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1, expected 0 to 7"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0, expected at least 1"),
        ({"max_length": 0}, "max_length is 0, expected at least 1"),
        ({"max_requests": 0}, "max_requests is 0, expected at least 1"),
        ({"kv_format": "fp8"}, "KV format 'fp8' is unknown, expected one of fp32, fp16, e4m3"),
        ({"draft_kv_format": "fp8"}, "KV format 'fp8' is unknown"),
    ],
)
def test_a_config_out_of_range_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DecoderConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("formats", "dtype"),
    [
        (("fp32", None), torch.float32),
        (("fp16", "fp32"), torch.float32),
        (("fp16", None), torch.float16),
        (("e4m3", "fp16"), torch.float16),
    ],
)
def test_index_keys_are_16_bit_but_for_exact_caches(
    formats: tuple[str, str | None], dtype: torch.dtype
) -> None:
    """An fp32 cache is there for parity, so nothing in it may be rounded."""
    assert DecoderConfig(*formats).cache_config().index_dtype == dtype


def test_speculation_needs_a_head() -> None:
    bare = tiny_model(mtp_num_hidden_layers=0)
    with pytest.raises(InputError, match="no MTP head: set num_draft_tokens to 0"):
        SpeculativeDecoder(bare, DecoderConfig(num_draft_tokens=1))
    SpeculativeDecoder(bare, DecoderConfig(num_draft_tokens=0))


def test_length_is_bounded_by_the_models_positions(model: Qwen4ExpForCausalLM) -> None:
    with pytest.raises(InputError, match="max_length is 4097, the model's positions end at 4096"):
        SpeculativeDecoder(model, DecoderConfig(max_length=4097))


def test_a_format_without_its_scales_is_refused(model: Qwen4ExpForCausalLM) -> None:
    with pytest.raises(InputError, match="KV format e4m3 needs a K and a V scale"):
        SpeculativeDecoder(model, DecoderConfig(kv_format="e4m3"))


def test_a_prompt_longer_than_max_length_is_refused(decoder: Build) -> None:
    with pytest.raises(InputError, match="the prompt has 129 tokens, max_length is 128"):
        decoder(3).open(random_tokens(129, 0))
