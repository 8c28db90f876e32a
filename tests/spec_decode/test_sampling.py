"""Sampled generation: the target's distribution, whatever the drafts, and a request's own random numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from page4.kernels.errors import InputError
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import GREEDY, SamplingOptions, Served, Server, SpeculativeDecoder, generate
from tests.kernels.sampling_cases import follows, probabilities
from tests.oracle.tiny import agreeable_model
from tests.spec_decode.conftest import Build
from tests.spec_decode.reference import continuation, safe_prompt

NEW = 16
PROMPT = (5, 3, 2)


def one(decoder: SpeculativeDecoder, prompt: tuple[int, ...], options: SamplingOptions) -> list[int]:
    (generation,), _ = generate(decoder, [prompt], NEW, sampling=options)
    return generation.tokens


@pytest.fixture(scope="module")
def small() -> Qwen4ExpForCausalLM:
    """Over few tokens, so that counts of pairs of them mean something."""
    return agreeable_model(seed=4, vocab_size=6)


@pytest.mark.parametrize(
    ("options", "num_draft_tokens"),
    [
        (SamplingOptions(0.8, sample_drafts=True), 3),
        (SamplingOptions(0.8), 2),
        (SamplingOptions(1.2, top_k=3, sample_drafts=True), 1),
        (SamplingOptions(1.0, top_p=0.8, min_p=0.05, sample_drafts=True), 3),
        (SamplingOptions(1.0, allowed_tokens=(1, 3, 4), sample_drafts=True), 2),
    ],
)
def test_generated_text_follows_the_target(
    small: Qwen4ExpForCausalLM, decoder: Build, options: SamplingOptions, num_draft_tokens: int
) -> None:
    """The first three tokens of 1,600 requests, against the product of the model's conditionals."""
    count, length, vocabulary = 1600, 3, 6
    engine = SpeculativeDecoder(small, decoder(num_draft_tokens, max_requests=400).config)
    each = [replace(options, seed=seed) for seed in range(count)]
    generations, _ = generate(engine, [PROMPT] * count, length, sampling=each)
    drawn = torch.tensor([g.tokens for g in generations])  # [count, length]
    accepted = [count for g in generations for count in g.accepted]
    assert len(set(accepted)) > 1, "some drafts are accepted and some are not"

    expected = torch.ones(1, dtype=torch.float64)
    prefixes = [PROMPT]
    for _ in range(length):
        logits = small(torch.tensor(prefixes)).logits[:, -1]
        allowed = None if options.allowed_tokens is None else list(options.allowed_tokens)
        rows = [
            probabilities(row, options.temperature, options.top_k, options.top_p, options.min_p, allowed)
            for row in logits
        ]
        expected = (expected[:, None] * torch.stack(rows)).flatten()
        prefixes = [(*prefix, token) for prefix in prefixes for token in range(vocabulary)]
    codes = (drawn * torch.tensor([vocabulary**2, vocabulary, 1])).sum(1)
    assert follows(codes, expected)
    assert not follows(codes, torch.ones_like(expected) / len(expected)), "the test can fail"


@pytest.mark.parametrize("sample_drafts", [False, True])
def test_a_requests_tokens_do_not_depend_on_its_batch(
    model: Qwen4ExpForCausalLM, decoder: Build, sample_drafts: bool
) -> None:
    """Neither on who is beside it, nor when it joins, nor on its place, nor on the step in flight."""
    options = [
        SamplingOptions(0.9, seed=7, sample_drafts=sample_drafts),
        SamplingOptions(1.3, top_k=9, seed=-5, sample_drafts=sample_drafts),
        GREEDY,
        SamplingOptions(0.6, top_p=0.9, min_p=0.01, seed=7, sample_drafts=sample_drafts),
        SamplingOptions(1.0, seed=2**62, sample_drafts=not sample_drafts),
    ]
    prompts = [safe_prompt(model, length, 24) for length in (17, 30, 3, 17, 26)]
    alone = [one(decoder(3), p, o) for p, o in zip(prompts, options, strict=True)]
    assert alone[2] == continuation(model, prompts[2], 24)[:NEW]
    assert alone[0] != alone[3], "another temperature"
    for rows, overlap in ((2, False), (2, True), (5, True)):
        generations, _ = generate(
            decoder(3, max_requests=rows), prompts, NEW, sampling=options, overlap=overlap
        )
        assert [g.tokens for g in generations] == alone

    engine = decoder(3, max_requests=4)
    server = Server(engine, overlap=True)
    served = [
        Served(p, NEW - 3 * i, sampling=o) for i, (p, o) in enumerate(zip(prompts, options, strict=True))
    ]
    for request in served:
        server.submit(request)
        server.step()
    server.run()
    assert [r.tokens for r in served] == [t[: NEW - 3 * i] for i, t in enumerate(alone)]


def test_drafts_that_nobody_sampled_are_not_judged_by_an_earlier_requests_distribution(
    model: Qwen4ExpForCausalLM, decoder: Build
) -> None:
    """In its lane one sampled drafts before; nobody does while it drafts; then somebody does beside it."""
    sampled = SamplingOptions(1.0, seed=1, sample_drafts=True)
    prompts = [safe_prompt(model, length, 24) for length in (17, 30, 26)]
    for seed in range(4):
        options = SamplingOptions(1.0, seed=seed)
        alone = one(decoder(3), prompts[1], options)
        server = Server(decoder(3, max_requests=2))
        server.submit(Served(prompts[0], NEW, sampling=sampled))
        server.run()
        judged = Served(prompts[1], NEW, sampling=options)
        server.submit(judged)
        while not judged.tokens:
            server.step()
        server.submit(Served(prompts[2], NEW, sampling=sampled))
        server.run()
        assert judged.tokens == alone


def test_the_seed_decides_and_drafts_do_not_share_its_noise(
    model: Qwen4ExpForCausalLM, decoder: Build
) -> None:
    prompt = safe_prompt(model, 17, 24)
    engine = decoder(3)
    options = SamplingOptions(1.0, seed=3, sample_drafts=True)
    assert one(engine, prompt, options) == one(engine, prompt, options)
    others = {tuple(one(engine, prompt, replace(options, seed=seed))) for seed in range(6)}
    assert len(others) == 6


def test_only_allowed_tokens_are_emitted_greedy_or_not(model: Qwen4ExpForCausalLM, decoder: Build) -> None:
    prompts = [safe_prompt(model, length, 24) for length in (17, 30, 17)]
    allowed = tuple(range(3, 128, 7))
    options = [
        SamplingOptions(allowed_tokens=allowed),
        GREEDY,
        SamplingOptions(1.5, allowed_tokens=allowed, sample_drafts=True),
    ]
    generations, _ = generate(decoder(3, max_requests=3), prompts, NEW, sampling=options)
    assert set(generations[0].tokens) | set(generations[2].tokens) <= set(allowed)
    assert generations[1].tokens == continuation(model, prompts[1], 24)[:NEW]
    plain, _ = generate(decoder(0, max_requests=3), prompts, NEW, sampling=options)
    assert plain[0].tokens == generations[0].tokens


def test_sampled_drafts_without_their_distributions_are_refused(
    model: Qwen4ExpForCausalLM, decoder: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from page4.spec_decode import decode_step

    monkeypatch.setattr(decode_step, "lanes_of", lambda store, lanes: None)
    with pytest.raises(InputError, match="sampled drafts need"):
        one(decoder(3), safe_prompt(model, 17, 24), SamplingOptions(1.0, sample_drafts=True))


def test_logits_without_a_distribution_end_with_a_message(
    model: Qwen4ExpForCausalLM, decoder: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Qwen4ExpForCausalLM, streams: torch.Tensor) -> torch.Tensor:
        return torch.full((len(streams), 128), torch.nan)

    monkeypatch.setattr(Qwen4ExpForCausalLM, "logits", broken)
    with pytest.raises(InputError, match="no token can follow: the logits are not finite"):
        one(decoder(3), safe_prompt(model, 17, 24), SamplingOptions(1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, expected 0"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"seed": 2**63}, "does not fit 64 bits"),
        ({"allowed_tokens": ()}, "allowed_tokens must name at least one token"),
        ({"allowed_tokens": (-1,)}, "allowed_tokens must name at least one token, and none below 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingOptions(**options)


def test_an_allowed_token_outside_the_vocabulary_is_refused(decoder: Build) -> None:
    with pytest.raises(InputError, match=r"allowed_tokens holds an id outside 0..127"):
        decoder(3).open([1], SamplingOptions(allowed_tokens=(128,)))


def test_masks_are_bits_of_words() -> None:
    words = SamplingOptions(allowed_tokens=(0, 31, 32, 65)).allowed_words(70)
    assert words.tolist() == [1 - 2**31, 1, 2]
    assert SamplingOptions().allowed_words(70).tolist() == [-1, -1, -1]
