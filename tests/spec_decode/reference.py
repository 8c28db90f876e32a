"""Decoding without any of the machinery under test: every token is the argmax of a full forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment
from page4.spec_decode import Generation, SpeculativeDecoder, generate
from tests.oracle.steps import exact_cache
from tests.oracle.tiny import random_tokens

# Logits differ by 1e-5 between ways to batch the same rows; a greedy choice is well defined if the second
# best is further away than that.
SAFE_GAP = 1e-3


@cache
def greedy(model: Qwen4ExpForCausalLM, prompt: tuple[int, ...], new_tokens: int) -> tuple[list[int], float]:
    """Greedy continuation, and the smallest gap between the best and the second-best logit on the way."""
    tokens, gap = list(prompt), float("inf")
    for _ in range(new_tokens):
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], gap


@cache
def safe_prompt(model: Qwen4ExpForCausalLM, length: int, new_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """A random prompt whose greedy continuation rounding cannot change."""
    for attempt in range(20):
        prompt = tuple(random_tokens(length, seed=1000 * seed + 17 * length + attempt, vocab_size=100))
        if greedy(model, prompt, new_tokens)[1] > SAFE_GAP:
            return prompt
    raise AssertionError("no prompt with a well-defined greedy continuation")


def continuation(model: Qwen4ExpForCausalLM, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    """The greedy continuation of a prompt."""
    return greedy(model, prompt, new_tokens)[0]


def expected(
    model: Qwen4ExpForCausalLM, prompts: Sequence[tuple[int, ...]], new_tokens: int
) -> list[list[int]]:
    """The greedy continuations of prompts."""
    return [continuation(model, prompt, new_tokens) for prompt in prompts]


def run(
    decoder: SpeculativeDecoder,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    stop: tuple[int, ...] = (),
) -> list[Generation]:
    """Generations, after checking that every page came back."""
    generations, _ = generate(decoder, prompts, new_tokens, stop)
    tables = decoder.cache.tables
    tables.check()
    assert tables.pool.free == tables.pool.total
    return generations


def emitted(generations: Sequence[Generation]) -> list[list[int]]:
    """The tokens of generations."""
    return [generation.tokens for generation in generations]


def naive_drafts(model: Qwen4ExpForCausalLM, tokens: list[int], count: int) -> list[int]:
    """Drafts after ``tokens``, from nothing: the head over the whole text, then over its own output.

    Row p of the head reads token p + 1, so it runs over all rows but the last token's.
    """
    rows = len(tokens) - 1
    streams = model(torch.tensor([tokens[:rows]])).streams[0]
    cache = exact_cache(model)
    request = cache.open()
    cache.reserve(request, rows + count)
    position, ids, drafts = 0, tokens[1:], []
    for _ in range(count):
        segment = Segment(request, position, torch.tensor(ids), (), decode=False)
        streams = model.draft_rows(RowBatch.pack([segment], model.device), streams, cache)[-1:]
        drafts.append(int(model.draft_logits(streams).argmax()))
        position, ids = position + len(ids), drafts[-1:]
    return drafts


def naive_round(model: Qwen4ExpForCausalLM, prefix: list[int], count: int) -> int:
    """Drafts that greedy decoding from ``prefix`` confirms."""
    tokens = [*prefix, int(model(torch.tensor([prefix])).logits[0, -1].argmax())]
    accepted = 0
    for draft in naive_drafts(model, tokens, count):
        if int(model(torch.tensor([tokens])).logits[0, -1].argmax()) != draft:
            break
        tokens.append(draft)
        accepted += 1
    return accepted
