"""The phase of a request decides what its rows are, never their number."""

from __future__ import annotations

import pytest

from page4.model import Qwen4ExpForCausalLM
from tests.spec_decode.conftest import Build
from tests.spec_decode.reference import continuation, emitted, expected, run, safe_prompt

NEW = 24


@pytest.mark.parametrize("num_draft_tokens", range(1, 6))
def test_chunk_tails_of_1_to_k_plus_1_tokens(
    model: Qwen4ExpForCausalLM, decoder: Build, num_draft_tokens: int
) -> None:
    """A last chunk with as many rows as a verify step is still prefill (1Cat-vLLM#637, vllm#51865)."""
    tails = range(1, num_draft_tokens + 2)
    prompts = [safe_prompt(model, 2 * 16 + tail, 10) for tail in tails]
    generations = run(decoder(num_draft_tokens, max_requests=len(prompts)), prompts, 10)
    assert emitted(generations) == expected(model, prompts, 10)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_a_prefill_tail_beside_decoding_requests(
    model: Qwen4ExpForCausalLM, decoder: Build, num_draft_tokens: int
) -> None:
    """Short prompts decode while a long one is in prefill, in the same steps and with equal row counts."""
    tail = num_draft_tokens + 1
    prompts = [safe_prompt(model, length, NEW) for length in (3, 64 + tail, 17)]
    generations = run(decoder(num_draft_tokens, max_requests=3), prompts, NEW)
    assert emitted(generations) == expected(model, prompts, NEW)


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 7, 128])
def test_the_chunk_size_does_not_matter(model: Qwen4ExpForCausalLM, decoder: Build, chunk: int) -> None:
    """Also chunks as short as decode steps."""
    prompts = [safe_prompt(model, length, NEW) for length in (17, 30)]
    generations = run(decoder(3, max_requests=2, prefill_chunk=chunk), prompts, NEW)
    assert emitted(generations) == expected(model, prompts, NEW)


def test_804_tokens_with_3_drafts(model: Qwen4ExpForCausalLM, decoder: Build) -> None:
    """The reported case: four chunks of 200 and a tail of K + 1."""
    prompt = safe_prompt(model, 804, 6)
    generations = run(decoder(3, max_length=816, prefill_chunk=200), [prompt], 6)
    assert emitted(generations) == [continuation(model, prompt, 6)]
