"""One speculative round from each of many prefixes of a text, against rounds computed from nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from page4.kernels.errors import InputError
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import RoundResult, SamplingOptions, SpeculativeDecoder, measure_rounds
from tests.oracle.tiny import random_tokens
from tests.spec_decode.conftest import Build
from tests.spec_decode.reference import naive_drafts, naive_round

TEXTS = [random_tokens(70, seed) for seed in (31, 32, 33)]
PREFIXES = [1, 2, 15, 16, 17, 33, 38, 39, 52, 64, 70]


def measure(decoder: SpeculativeDecoder, texts: list[list[int]], prefixes: list[int]) -> RoundResult:
    """The result, after checking that every page came back."""
    result = measure_rounds(decoder, texts, prefixes)
    decoder.cache.tables.check()
    assert decoder.cache.tables.pool.free == decoder.cache.tables.pool.total
    return result


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 4, 5])
def test_rounds_equal_those_computed_from_nothing(
    model: Qwen4ExpForCausalLM, decoder: Build, num_draft_tokens: int
) -> None:
    """A fresh full forward pass per prefix and per token, no cache, no chunks, no batch.

    With K = 4 the rows of a round overwrite raw index keys that the text after it still needs.
    """
    prefixes = PREFIXES[1:]
    result = measure(decoder(num_draft_tokens, max_requests=3), TEXTS, prefixes)
    expected = [[naive_round(model, text[:p], num_draft_tokens) for p in prefixes] for text in TEXTS]
    assert result.accepted.tolist() == expected
    counts = set(result.accepted.flatten().tolist())
    assert {0, num_draft_tokens} <= counts <= set(range(num_draft_tokens + 1))


@pytest.mark.parametrize("chunk", [4, 7, 16, 128])
def test_the_chunk_size_does_not_matter(decoder: Build, chunk: int) -> None:
    result = measure(decoder(3, max_requests=3, prefill_chunk=chunk), TEXTS, PREFIXES)
    expected = measure(decoder(3, max_requests=3, prefill_chunk=16), TEXTS, PREFIXES)
    assert result.accepted.tolist() == expected.accepted.tolist()


@pytest.mark.parametrize("options", [{"kv_format": "fp32"}, {"kv_format": "fp16"}], ids=["fp32", "fp16"])
def test_a_round_leaves_no_trace(decoder: Build, options: dict[str, Any]) -> None:
    """Every prefix measured after many others gives what it gives alone."""
    shared = decoder(5, max_requests=3, **options)
    together = measure(shared, TEXTS, PREFIXES).accepted
    for i, prefix in enumerate(PREFIXES):
        alone = measure(shared, TEXTS, [prefix]).accepted
        assert alone[:, 0].tolist() == together[:, i].tolist()


def test_a_text_measured_beside_others_equals_itself_alone(decoder: Build) -> None:
    shared = decoder(3, max_requests=3)
    together = measure(shared, TEXTS, PREFIXES).accepted
    for i, text in enumerate(TEXTS):
        assert measure(shared, [text], PREFIXES).accepted[0].tolist() == together[i].tolist()


def test_only_the_prefix_counts_not_what_follows_it(decoder: Build) -> None:
    """The text after the last prefix is never read, and rounds see nothing of later text."""
    shared = decoder(3)
    (text, other) = TEXTS[:2]
    expected = measure(shared, [text], [33, 52]).accepted
    assert measure(shared, [text[:52] + other[52:]], [33, 52]).accepted.tolist() == expected.tolist()
    assert measure(shared, [text[:33] + other[33:]], [33, 52]).accepted[0, 0] == expected[0, 0]


def test_measuring_twice_gives_the_same(decoder: Build) -> None:
    shared = decoder(3, max_requests=3)
    first, second = (measure(shared, TEXTS, PREFIXES).accepted for _ in range(2))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize("sample_drafts", [False, True])
def test_a_sampled_round_draws_by_seed_and_not_by_batch(decoder: Build, sample_drafts: bool) -> None:
    shared = decoder(3, max_requests=3)
    options = [SamplingOptions(1.0, seed=seed, sample_drafts=sample_drafts) for seed in (5, 6, 7)]
    together = measure_rounds(shared, TEXTS, PREFIXES, options).accepted
    alone = [
        measure_rounds(shared, [text], PREFIXES, [own]).accepted[0]
        for text, own in zip(TEXTS, options, strict=True)
    ]
    assert together.tolist() == [counts.tolist() for counts in alone]
    others = [SamplingOptions(1.0, seed=seed, sample_drafts=sample_drafts) for seed in (8, 9, 10)]
    assert measure_rounds(shared, TEXTS, PREFIXES, others).accepted.tolist() != together.tolist()


def test_a_sampled_round_accepts_as_often_as_the_distributions_say(
    model: Qwen4ExpForCausalLM, decoder: Build
) -> None:
    """A greedy draft after a drawn token t is accepted with probability p(draft | t)."""
    prefix, count = TEXTS[0][:33], 384
    follows = model(torch.tensor([prefix])).logits[0, -1].double().softmax(0)
    likely = [int(token) for token in follows.argsort(descending=True)[:40]]
    rate = 0.0
    for token in likely:
        text = [*prefix, token]
        (draft,) = naive_drafts(model, text, 1)
        accepts = model(torch.tensor([text])).logits[0, -1].double().softmax(0)[draft]
        rate += float(follows[token] * accepts)
    missed = 1 - float(follows[likely].sum())
    options = [SamplingOptions(1.0, seed=seed) for seed in range(count)]
    accepted = measure_rounds(decoder(1, max_requests=count), [prefix] * count, [33], options).accepted
    error = 4.5 * (rate * (1 - rate) / count) ** 0.5  # one run in 150,000 is further away
    assert rate - error <= float(accepted.float().mean()) <= rate + missed + error
    assert missed < 0.3 and 0.05 < rate < 0.95


def test_shapes_and_timings(decoder: Build) -> None:
    result = measure(decoder(3, max_requests=3), TEXTS, [17, 40])
    assert result.prefix_lengths == [17, 40]
    assert result.accepted.shape == (3, 2)
    assert result.prefill_tokens == 3 * 16
    assert result.prefill_seconds > 0
    assert len(result.round_seconds) == 2
    assert all(seconds > 0 for seconds in result.round_seconds)


@pytest.mark.parametrize(
    ("texts", "prefixes", "options", "message"),
    [
        (TEXTS, [], {}, r"prefix lengths \[\] are not ascending from at least 1"),
        (TEXTS, [0, 5], {}, r"prefix lengths \[0, 5\] are not ascending"),
        (TEXTS, [9, 9], {}, r"prefix lengths \[9, 9\] are not ascending"),
        (TEXTS, [9, 8], {}, r"prefix lengths \[9, 8\] are not ascending"),
        ([TEXTS[0], TEXTS[1][:40]], [41], {}, "text 1 has 40 tokens, the longest prefix needs 41"),
        ([], [9], {}, "no texts given"),
        (TEXTS, [9], {"max_requests": 2}, "3 texts at once, max_requests is 2"),
        (TEXTS, [9], {"num_draft_tokens": 0}, "num_draft_tokens is 0: a round needs at least one draft"),
        ([[128] * 9], [9], {}, "outside 0..127"),
        ([[1] * 200], [150], {}, "the prompt has 150 tokens, max_length is 128"),
    ],
)
def test_wrong_input_is_refused(
    decoder: Build, texts: list[list[int]], prefixes: list[int], options: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        measure_rounds(decoder(**({"max_requests": 3} | options)), texts, prefixes)


def test_a_refused_text_leaves_nothing_behind(decoder: Build) -> None:
    shared = decoder(3, max_requests=3)
    with pytest.raises(InputError):
        measure_rounds(shared, [TEXTS[0], [128] * 70], [9])
    measure(shared, TEXTS, [9])
