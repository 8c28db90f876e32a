"""Reuse, tiers and preemption change no bit of what is emitted, nor of what is in the cache."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from page4.experiments.prompt_windows import nonce
from page4.kernels.errors import InputError
from page4.kvcache import KVScales, ScalePair
from page4.kvcache.prefix_cache import PrefixConfig
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import (
    DecoderConfig,
    Request,
    SamplingOptions,
    Served,
    Server,
    ServingStats,
    SpeculativeDecoder,
    generate,
    measure_rounds,
)
from tests.kvcache.stamps import DelayedQueue, delayed
from tests.oracle.tiny import random_tokens, tiny_model
from tests.spec_decode.conftest import Build
from tests.spec_decode.test_generation import formats

__all__ = ["delayed"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK, INTERVAL, NEW = 16, 32, 8
Outputs = list[tuple[list[int], list[int]]]


def text(length: int, seed: int) -> list[int]:
    return random_tokens(length, seed, vocab_size=100)


PROMPTS = [text(75, 1), text(75, 1), text(66, 1) + text(9, 2), text(30, 3), text(48, 1) + text(30, 4)]
"""A prompt, its repeat, its repeat with a changed suffix, another, and one with a beginning in common."""


def prefix(host: bool = True, folder: Path | None = None, **options: Any) -> PrefixConfig:
    """Host memory for seven groups, in fp16, of the model of these tests."""
    options = {"interval": INTERVAL, "snapshots": 2, "host_gib": 5e-4 if host else 0.0} | options
    return PrefixConfig(folder=folder, model="tiny" if folder else "", **options)


def serve(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], new: int = NEW, **options: Any
) -> tuple[Outputs, ServingStats]:
    """Tokens and accepted drafts of each, after a check that no page was lost."""
    generations, stats = generate(decoder, prompts, new, **options)
    decoder.cache.tables.check()
    assert decoder.cache.tables.pool.held == 0
    return [(g.tokens, g.accepted) for g in generations], stats


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3"])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_outputs_with_everything_on_equal_those_with_everything_off(
    decoder: Build, tmp_path: Path, kv_format: str, num_draft_tokens: int, concurrency: int
) -> None:
    """Pages for little more than one request, two snapshots on the device, the rest in lower tiers."""
    options = {**formats(kv_format, None), "prefill_chunk": CHUNK, "max_requests": concurrency}
    off, _ = serve(decoder(num_draft_tokens, **options), PROMPTS)
    engine = decoder(
        num_draft_tokens, **options, prefix=prefix(folder=tmp_path), preemption=True, max_tokens=100
    )
    on, _ = serve(engine, PROMPTS)
    assert on == off
    assert engine.prefix is not None
    engine.prefix.close()
    restarted = decoder(num_draft_tokens, **options, prefix=prefix(folder=tmp_path))
    again, stats = serve(restarted, PROMPTS)
    assert again == off
    assert restarted.prefix is not None
    assert restarted.prefix.stats.file_hits, "the files of the first decoder serve the second"
    assert stats.prefill_tokens < sum(len(prompt) - 1 for prompt in PROMPTS) / 2
    restarted.prefix.close()


@pytest.mark.parametrize(("overlap", "sampled"), [(False, False), (True, True)])
def test_64_segments_under_a_pool_that_forces_eviction_and_preemption(
    decoder: Build, overlap: bool, sampled: bool
) -> None:
    families = [text(40, seed) for seed in range(6)]
    prompts = [families[i * i % 6][: 34 + i % 7] + text(i % 5, 50 + i % 7) for i in range(64)]
    sampling = [SamplingOptions(temperature=0.8 * sampled, seed=i, sample_drafts=sampled) for i in range(64)]
    options = {"prefill_chunk": INTERVAL, "max_requests": 4, "sampling": sampling, "overlap": overlap}
    off, _ = serve_with(decoder, prompts, **options)
    on, engine = serve_with(
        decoder, prompts, **options, prefix=prefix(host=False, snapshots=6), preemption=True, max_tokens=112
    )
    assert on == off
    assert engine.stats.preemptions >= 3 and engine.stats.replayed_tokens > 0
    assert engine.stats.diverged == 0
    reuse = engine.decoder.prefix
    assert reuse is not None and reuse.stats.hits > 5
    assert len(reuse.index) < sum(len(p) // 16 for p in prompts), "pages were evicted"


def serve_with(
    decoder: Build,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingOptions],
    overlap: bool,
    **options: Any,
) -> tuple[Outputs, Server]:
    """8 new tokens of each, by a server that can be asked afterwards."""
    server = Server(decoder(3, **options), overlap)
    requests = [Served(p, 8, sampling=s) for p, s in zip(prompts, sampling, strict=True)]
    for request in requests:
        server.submit(request)
    server.run()
    server.decoder.cache.tables.check()
    assert server.decoder.cache.tables.pool.held == 0
    return [(request.tokens, request.accepted) for request in requests], server


def test_clients_of_a_preempted_request_get_every_token_once(decoder: Build) -> None:
    streamed: dict[Served, list[int]] = {}

    def on_tokens(request: Served, tokens: list[int]) -> None:
        streamed.setdefault(request, []).extend(tokens)

    server = Server(decoder(3, max_requests=3, preemption=True, max_tokens=110))
    requests = [Served(text(20, seed), 40, on_tokens=on_tokens) for seed in range(3)]
    for request in requests:
        server.submit(request)
    server.run()
    assert max(request.preemptions for request in requests) > 0
    assert requests[0].preemptions == 0, "whoever came first stays"
    alone, _ = serve(decoder(3), [request.prompt for request in requests], 40)
    for request, (tokens, accepted) in zip(requests, alone, strict=True):
        assert streamed[request] == request.tokens == tokens
        assert request.accepted == accepted


def test_a_second_time_that_chooses_other_tokens_goes_on_from_what_the_client_has(
    decoder: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if rounding had decided: once, a token is changed on its way to the client."""
    server = Server(decoder(2, max_requests=2, preemption=True, max_tokens=64))
    first, second = (Served(text(20, seed), 30) for seed in range(2))
    collect, altered = SpeculativeDecoder.collect, []

    def alter(self: SpeculativeDecoder, step: Any) -> dict[Request, list[int]]:
        emitted = collect(self, step)
        for request, tokens in emitted.items():
            if server._running.get(request) is second and len(request.emitted) > 3 and not altered:
                tokens[-1] = request.tokens[-1] = (tokens[-1] + 1) % 100
                altered.append(request)
        return emitted

    monkeypatch.setattr(SpeculativeDecoder, "collect", alter)
    for request in (first, second):
        server.submit(request)
    while not second.preemptions:
        server.step()
    had = list(second.tokens)
    assert altered and len(had) < 30
    server.run()
    assert server.stats.diverged == 1
    assert second.tokens[: len(had)] == had
    ((rest, _),), _ = serve(decoder(0), [[*second.prompt, *had]], 30 - len(had))
    assert second.tokens[len(had) :] == rest, "the continuation of what the client has"
    # Both lives begin with a step that verifies nothing; the last one may emit more than is wanted.
    assert 30 <= 2 + sum(count + 1 for count in second.accepted) <= 32


def states(decoder: SpeculativeDecoder, request: Request) -> list[Tensor]:
    """All that decoding reads of a prefilled request: K, V, index keys and states of every layer."""
    cache, length = decoder.cache, request.computed
    assert cache.draft is not None
    found, pages = [], cache.tables.pages(request.row)
    for layer in (*cache.qsa, cache.draft.mixer):
        found += layer.stored(request.row, length)  # type: ignore[union-attr]
        keys = layer.compressed_pages[torch.tensor(pages, dtype=torch.int64)]  # type: ignore[union-attr]
        found.append(keys.flatten(0, 1)[: length // 4])
    return [part.clone() for part in (*found, *cache.prefilled_state(request.row))]


def prefill(decoder: SpeculativeDecoder, tokens: Sequence[int]) -> Request:
    """A request as a server would leave it before its first decode step."""
    request = decoder.open(tokens)
    while request.computed < request.prompt_length - 1:
        stop = min(request.computed + decoder.config.prefill_chunk, request.prompt_length - 1)
        decoder.prefill({request: stop})
    decoder.start(request)
    return request


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "int8"])
def test_a_reused_prefix_is_the_same_bits_with_poison_all_around(
    decoder: Build, delayed: DelayedQueue, kv_format: str
) -> None:
    """What a request gets back equals what it would compute; nothing outside is read (cases 1, 2, 16, 17)."""
    options = {**formats(kv_format, None), "prefill_chunk": CHUNK, "max_requests": 2}
    for length in (2, 16, 17, 18, 33, 49, 65, 65 + 4, 80):  # chunk * n + r, K + 1 among them
        tokens = text(length, 7)
        engine, cold = decoder(3, **options, prefix=prefix()), decoder(3, **options)
        expected = states(cold, prefill(cold, tokens))
        engine.close(prefill(engine, tokens))
        for evicted in (False, True):
            poison(engine, evict=evicted)
            request = engine.open(tokens)
            assert request.computed == length - 1, "all of it is known"
            engine.start(request)
            assert all(map(same_bits, states(engine, request), expected))
            engine.close(request)
        engine.cache.tables.check()


def test_the_kernels_compute_the_same_bits_beside_others_and_after_a_reused_prefix() -> None:
    """On the Triton backend: a prompt after one that shares its beginning, against the prompt alone."""
    layers = ["linear_attention", "full_attention"]
    model = tiny_model(seed=3, num_hidden_layers=2, layer_types=layers, ple_layer_ids=[1]).to(DEVICE)
    model.use_backend("triton")
    scales = KVScales((ScalePair(0.02, 0.02),), ScalePair(0.02, 0.02))
    options: dict[str, Any] = {"scales": scales, "prefill_chunk": CHUNK, "max_length": 32}

    def build(**more: Any) -> SpeculativeDecoder:
        return SpeculativeDecoder(model, DecoderConfig("e4m3", num_draft_tokens=2, **options, **more))

    alone, reusing = build(), build(max_requests=2, prefix=prefix(interval=CHUNK))
    first, second = text(17, 1), text(17, 1) + text(4, 2)
    expected = states(alone, prefill(alone, second))
    prefill(reusing, first)
    poison(reusing, evict=False, rows=(1,))
    request = prefill(reusing, second)
    assert reusing.prefix is not None and reusing.prefix.stats.reused_tokens == 16
    assert all(map(same_bits, states(reusing, request), expected))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def poison(decoder: SpeculativeDecoder, evict: bool, rows: Sequence[int] = (0,)) -> None:
    """0xFF where nothing of value lies: in free pages, or in all that nobody holds, and in states of rows."""
    pool = decoder.cache.tables.pool
    pages = pool.allocate(pool.available if evict else pool.free)
    for stored in decoder.cache.paged_tensors():
        stored.view(torch.uint8)[pages] = 0xFF
    pool.release(pages)
    for row in rows:
        for state in decoder.cache.prefilled_state(row):
            state.fill_(float("nan"))


def test_a_request_that_is_closed_before_its_prefix_is_back_harms_nobody(
    decoder: Build, delayed: DelayedQueue
) -> None:
    engine = decoder(3, prefill_chunk=CHUNK, prefix=prefix(), max_tokens=90)
    serve(engine, [text(75, 1)])
    poison(engine, evict=True)
    left = engine.open(text(75, 1))
    assert not engine.restored(left)
    engine.close(left)
    poison(engine, evict=True)
    other = decoder(3, prefill_chunk=CHUNK)
    for tokens in (text(70, 5), text(75, 1)):
        assert serve(engine, [tokens])[0] == serve(other, [tokens])[0]


def test_others_decode_while_a_prefix_is_on_its_way_back(decoder: Build, delayed: DelayedQueue) -> None:
    engine = decoder(3, prefill_chunk=CHUNK, prefix=prefix(), max_requests=2)
    alone, _ = serve(decoder(3), [text(20, 5), text(75, 1)], 24)
    serve(engine, [text(75, 1)])
    poison(engine, evict=True)
    server = Server(engine)
    running, restoring = Served(text(20, 5), 24), Served(text(75, 1), 24)
    server.submit(running)
    server.step()
    server.submit(restoring)
    while not running.finished:
        server.step()
        assert not restoring.tokens, "its copies have not been made"
    server.run()
    assert [running.tokens, restoring.tokens] == [tokens for tokens, _ in alone]


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_file_is_found_and_its_tokens_are_computed_again(
    decoder: Build, tmp_path: Path, damage: str
) -> None:
    options: dict[str, Any] = {**formats("e4m3", None), "prefill_chunk": CHUNK}
    first = decoder(3, **options, prefix=prefix(folder=tmp_path))
    expected, _ = serve(first, [PROMPTS[0]])
    assert first.prefix is not None
    first.prefix.close()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3, "two intervals, and the end; the last whole chunk is an interval's"
    for file in files:
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content[:-50] if damage == "truncated" else content)
    second = decoder(3, **options, prefix=prefix(folder=tmp_path))
    assert serve(second, [PROMPTS[0]])[0] == expected
    assert second.prefix is not None and second.prefix.files is not None
    assert second.prefix.files.corrupt > 0 and second.prefix.stats.hits == 0
    second.prefix.close()
    third = decoder(3, **options, prefix=prefix(folder=tmp_path))
    assert serve(third, [PROMPTS[0]])[0] == expected
    assert third.prefix is not None and third.prefix.stats.file_hits == 1, "the files were written anew"
    third.prefix.close()


def test_a_killed_decoder_leaves_a_folder_that_the_next_one_goes_on_from(
    model: Qwen4ExpForCausalLM, decoder: Build, tmp_path: Path
) -> None:
    ours, theirs = multiprocessing.Pipe()
    arguments = (model, tmp_path, theirs)
    process = multiprocessing.get_context("fork").Process(target=_serve_and_hang, args=arguments)
    process.start()
    assert ours.poll(60)
    expected = ours.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    engine = decoder(3, prefill_chunk=CHUNK, prefix=prefix(folder=tmp_path))
    assert serve(engine, PROMPTS[:1])[0] == expected
    assert engine.prefix is not None and engine.prefix.stats.file_hits == 1
    engine.prefix.close()


def _serve_and_hang(model: Qwen4ExpForCausalLM, folder: Path, pipe: Connection) -> None:
    config = DecoderConfig("fp32", max_length=128, prefill_chunk=CHUNK, prefix=prefix(folder=folder))
    engine = SpeculativeDecoder(model, config)
    outputs, _ = serve(engine, PROMPTS[:1])
    assert engine.prefix is not None and engine.prefix.files is not None
    while len(engine.prefix.files) < 3:
        engine.prefix.poll()
    pipe.send(outputs)
    signal.pause()


def test_a_folder_of_another_format_or_chunk_is_refused(decoder: Build, tmp_path: Path) -> None:
    options = {"prefill_chunk": CHUNK, "prefix": prefix(folder=tmp_path)}
    engine = decoder(3, **options)
    assert engine.prefix is not None
    engine.prefix.close()
    with pytest.raises(InputError, match="belongs to another kv_format: 'fp32', this run has 'e4m3'"):
        decoder(3, **options, **formats("e4m3", None))
    with pytest.raises(InputError, match="belongs to another num_draft_tokens: '3', this run has '2'"):
        decoder(2, **options)
    with pytest.raises(InputError, match="belongs to another prefill_chunk"):
        decoder(3, prefill_chunk=32, prefix=prefix(folder=tmp_path))


def test_prompts_that_were_not_cut_as_a_server_cuts_them_are_not_kept(decoder: Build) -> None:
    """Several at once, or chunks elsewhere: other shapes, and other bits."""
    engine = decoder(3, prefill_chunk=CHUNK, max_requests=2, prefix=prefix(host=False))
    reuse = engine.prefix
    assert reuse is not None
    pair = [engine.open(text(40, seed)) for seed in (1, 2)]
    for stop in (16, 32, 39):
        engine.prefill(dict.fromkeys(pair, stop))
    for request in pair:
        engine.close(request)
    odd = engine.open(text(40, 1))
    for stop in (10, 26, 39):
        engine.prefill({odd: stop})
    engine.close(odd)
    assert len(reuse.index) == len(reuse.snapshots) == 0


def test_preempted_requests_that_fill_the_pool_alone_are_served_and_larger_ones_refused(
    decoder: Build,
) -> None:
    engine = decoder(3, prefill_chunk=CHUNK, max_requests=2, max_tokens=64, preemption=True, prefix=prefix())
    total = engine.cache.tables.pool.total * 16
    fits = total - 20 - engine.config.overrun
    alone, _ = serve(decoder(3), [text(20, 1), text(20, 2)], fits)
    assert serve(engine, [text(20, 1), text(20, 2)], fits)[0] == alone
    with pytest.raises(
        InputError, match=r"the request may need .* pages, the cache has .*: raise max_tokens"
    ):
        Server(engine).submit(Served(text(20, 1), fits + 1))


def test_requests_with_a_prefix_in_common_run_together_where_their_pages_would_not_fit(
    decoder: Build,
) -> None:
    """What others hold of a prompt needs no room a second time."""
    engine = decoder(3, prefill_chunk=CHUNK, max_requests=2, max_tokens=112, preemption=True, prefix=prefix())
    server = Server(engine)
    first, second = Served(text(75, 1), NEW), Served(text(75, 1), NEW)
    server.submit(first)
    while not first.tokens:
        server.step()
    server.submit(second)
    server.step()
    assert second.tokens and not first.finished, "8 pages, of which each needs 6"
    server.run()
    assert second.tokens == first.tokens and not first.preemptions


def test_a_nonce_defeats_reuse(decoder: Build) -> None:
    """Prompts of one text with a nonce each, as studies make them, share nothing; without, all of it."""
    engine = decoder(3, prefill_chunk=CHUNK, prefix=prefix())
    reuse = engine.prefix
    assert reuse is not None
    serve(engine, [[*nonce(0, "prompt", i).encode(), *text(60, 1)] for i in range(3)], 1)
    assert (reuse.stats.lookups, reuse.stats.hits, reuse.stats.reused_tokens) == (3, 0, 0)
    serve(engine, [[*nonce(0, "prompt", 2).encode(), *text(60, 1)]], 1)
    assert reuse.stats.hits == 1


def test_rounds_refuse_a_decoder_that_would_not_compute_their_texts(decoder: Build) -> None:
    with pytest.raises(InputError, match="rounds are measured on texts that are computed"):
        measure_rounds(decoder(3, prefill_chunk=CHUNK, prefix=prefix()), [text(40, 1)], [20])
