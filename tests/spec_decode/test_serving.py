"""Requests that come, go and end at any step get what each would get alone."""

from __future__ import annotations

from itertools import chain

import pytest

from page4.kernels.errors import InputError
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import Served, Server, SpeculativeDecoder
from tests.spec_decode.conftest import Build, Forcing
from tests.spec_decode.reference import continuation, emitted, expected, run, safe_prompt

NEW = 24


def settle(decoder: SpeculativeDecoder) -> None:
    """Every page came back."""
    tables = decoder.cache.tables
    tables.check()
    assert tables.pool.free == tables.pool.total


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_draft_tokens", [0, 3, 5])
def test_requests_join_and_leave_at_any_step(
    model: Qwen4ExpForCausalLM, decoder: Build, num_draft_tokens: int, overlap: bool
) -> None:
    """One more every other step, each with its own limit and stop token, and prompts of several chunks."""
    engine = decoder(num_draft_tokens, max_requests=3, prefill_chunk=16)
    server = Server(engine, overlap)
    lengths = (3, 45, 17, 1, 30, 64 + num_draft_tokens + 1)
    prompts = [safe_prompt(model, length, NEW) for length in lengths]
    alone = expected(model, prompts, NEW)
    requests = []
    for i, (prompt, tokens) in enumerate(zip(prompts, alone, strict=True)):
        stop = frozenset({tokens[5 + 3 * i]} if i % 2 else ())
        requests.append(Served(prompt, NEW - 2 * i, stop))
    for step, request in enumerate(requests):
        server.submit(request)
        server.step()
        if step % 2:
            server.step()
    server.run()
    for request, tokens in zip(requests, alone, strict=True):
        ends = [tokens.index(stop) + 1 for stop in request.stop_token_ids]
        assert request.tokens == tokens[: min([request.max_new_tokens, *ends])]
        assert request.finished
    settle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_streamed_as_they_come(model: Qwen4ExpForCausalLM, decoder: Build, overlap: bool) -> None:
    """In order, none twice, none after the last, and each request its own."""
    streamed: dict[Served, list[list[int]]] = {}

    def on_tokens(request: Served, tokens: list[int]) -> None:
        assert tokens
        streamed.setdefault(request, []).append(tokens)
        assert request.tokens == list(chain.from_iterable(streamed[request]))

    engine = decoder(3, max_requests=2)
    server = Server(engine, overlap)
    prompts = [safe_prompt(model, length, NEW) for length in (17, 30, 45)]
    requests = [Served(prompt, NEW, on_tokens=on_tokens) for prompt in prompts]
    for request in requests:
        server.submit(request)
    server.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert list(chain.from_iterable(streamed[request])) == continuation(model, prompt, NEW)
        assert len(streamed[request]) == len(request.accepted) + 1
    settle(engine)


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_token_in_the_middle_of_an_accepted_run(
    model: Qwen4ExpForCausalLM, decoder: Build, force_drafts: Forcing, position: int, overlap: bool
) -> None:
    """The rest of the run is not emitted, and with overlap the step in flight is discarded."""
    prompts = [safe_prompt(model, length, NEW) for length in (30, 17)]
    if not overlap:  # a step in flight has read its drafts already
        force_drafts(prompts, lambda step: 3)
    tokens = [continuation(model, prompt, NEW) for prompt in prompts]
    stop = tokens[0][position]
    engine = decoder(3, max_requests=2)
    server = Server(engine, overlap)
    requests = [Served(prompts[0], NEW, frozenset({stop})), Served(prompts[1], NEW)]
    for request in requests:
        server.submit(request)
    server.run()
    assert requests[0].tokens == tokens[0][: tokens[0].index(stop) + 1]
    assert requests[1].tokens == tokens[1]
    settle(engine)


def test_a_freed_row_serves_the_next_request_though_a_step_is_in_flight(
    model: Qwen4ExpForCausalLM, decoder: Build
) -> None:
    """The discarded step wrote to pages and slots that another request has now."""
    engine = decoder(3, max_requests=1)
    server = Server(engine, overlap=True)
    prompts = [safe_prompt(model, length, NEW) for length in (30, 17, 45, 3)]
    requests = [Served(prompt, 2 + 5 * i) for i, prompt in enumerate(prompts)]
    for request in requests:
        server.submit(request)
    server.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == continuation(model, prompt, NEW)[: request.max_new_tokens]
    settle(engine)


def test_a_cancelled_request_leaves_the_others_alone(model: Qwen4ExpForCausalLM, decoder: Build) -> None:
    engine = decoder(3, max_requests=2)
    prompts = [safe_prompt(model, length, NEW) for length in (30, 17, 45)]
    requests = [Served(prompt, NEW) for prompt in prompts]
    server = Server(engine, overlap=True)

    def stop_the_first(request: Served, tokens: list[int]) -> None:
        if len(request.tokens) > 5:
            server.cancel(requests[0])

    requests[1].on_tokens = stop_the_first
    for request in requests:
        server.submit(request)
    server.run()
    assert requests[0].finished and len(requests[0].tokens) < NEW
    for request, prompt in list(zip(requests, prompts, strict=True))[1:]:
        assert request.tokens == continuation(model, prompt, NEW)
    settle(engine)


def test_requests_wait_for_pages_that_others_may_still_need(
    model: Qwen4ExpForCausalLM, decoder: Build
) -> None:
    """Admission counts what running requests may grow to, so none is ever refused a page."""
    prompts = [safe_prompt(model, length, NEW) for length in (30, 45, 17)]
    engine = decoder(3, max_requests=3, max_tokens=60)
    server = Server(engine, overlap=True)
    requests = [Served(prompt, NEW) for prompt in prompts]
    for request in requests:
        server.submit(request)
    most = 0
    while server.busy:
        server.step()
        most = max(
            most, sum(r.finished or bool(r.tokens) for r in requests) - sum(r.finished for r in requests)
        )
    assert most == 1, "two of them may need more than there is"
    assert [r.tokens for r in requests] == expected(model, prompts, NEW)


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([1, 2], 0, "max_new_tokens is 0, expected at least 1"),
        ([], 5, "the prompt is empty, expected at least one token"),
        ([1] * 100, 29, "has 100 tokens and 29 more are asked for, max_length is 128"),
        ([1] * 40, 60, r"may need \d pages, the cache has 6: raise max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    decoder: Build, prompt: list[int], new: int, message: str
) -> None:
    server = Server(decoder(3, max_tokens=80))
    with pytest.raises(InputError, match=message):
        server.submit(Served(prompt, new))
    assert not server.busy


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_format", ["fp16", "e4m3"])
def test_speculation_changes_no_token_at_any_concurrency(
    model: Qwen4ExpForCausalLM, decoder: Build, concurrency: int, kv_format: str
) -> None:
    from tests.spec_decode.test_generation import formats

    prompts = [safe_prompt(model, 5 + 7 * i, NEW) for i in range(8)]
    options = {**formats(kv_format, None), "max_requests": concurrency}
    plain = run(decoder(0, **options), prompts, NEW)
    speculative = run(decoder(3, **options), prompts, NEW)
    assert emitted(speculative) == emitted(plain)
