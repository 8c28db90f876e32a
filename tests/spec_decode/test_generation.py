"""Greedy speculative decoding emits exactly what greedy decoding without speculation emits, in float32."""

from __future__ import annotations

from typing import Any

import pytest

from page4.kernels.errors import InputError
from page4.kvcache import KVScales, ScalePair, get_format
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import SpeculativeDecoder, generate
from tests.oracle.tiny import tiny_model
from tests.spec_decode.conftest import Build, Forcing
from tests.spec_decode.reference import continuation, emitted, expected, run, safe_prompt

NEW = 24
LENGTHS = (3, 17, 30, 45)
SCALES = KVScales((ScalePair(0.02, 0.02),) * 2, ScalePair(0.02, 0.02))


@pytest.mark.parametrize("num_draft_tokens", range(6))
def test_output_equals_greedy_decoding(
    model: Qwen4ExpForCausalLM, decoder: Build, num_draft_tokens: int
) -> None:
    """K = 0 decodes one token a step; K = 1 to 5 accept whatever the head gets right."""
    prompts = [safe_prompt(model, length, NEW) for length in LENGTHS]
    generations = run(decoder(num_draft_tokens, max_requests=4), prompts, NEW)
    assert emitted(generations) == expected(model, prompts, NEW)
    counts = {count for generation in generations for count in generation.accepted}
    assert counts <= set(range(num_draft_tokens + 1))
    assert {0, min(1, num_draft_tokens), num_draft_tokens} <= counts, (
        "the model should accept all and nothing at times"
    )


@pytest.mark.parametrize("num_draft_tokens", range(1, 6))
def test_every_number_of_accepted_drafts(
    model: Qwen4ExpForCausalLM, decoder: Build, force_drafts: Forcing, num_draft_tokens: int
) -> None:
    """0, K, 1, K-1, ... drafts accepted in turn: rejection after every row, and after none."""
    prompts = [safe_prompt(model, length, NEW) for length in LENGTHS]
    order = [
        0,
        num_draft_tokens,
        1,
        num_draft_tokens - 1,
        0,
        0,
        num_draft_tokens,
        *range(num_draft_tokens + 1),
    ]
    force_drafts(prompts, lambda step: order[step % len(order)])
    generations = run(decoder(num_draft_tokens, max_requests=4), prompts, NEW)
    assert emitted(generations) == expected(model, prompts, NEW)
    for generation in generations:
        steps = len(generation.accepted)
        assert generation.accepted == [order[step % len(order)] for step in range(steps)]


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_batches_of_different_lengths(model: Qwen4ExpForCausalLM, decoder: Build, batch: int) -> None:
    prompts = [safe_prompt(model, length, NEW) for length in LENGTHS[:batch]]
    generations = run(decoder(3, max_requests=batch), prompts, NEW)
    assert emitted(generations) == expected(model, prompts, NEW)


def test_a_model_whose_drafts_are_all_wrong(decoder: Build) -> None:
    """With random weights the head never agrees: every step rolls everything back."""
    random = tiny_model(seed=5)
    prompts = [safe_prompt(random, length, 10) for length in (9, 26)]
    config = decoder(4, max_requests=2).config
    generations = run(SpeculativeDecoder(random, config), prompts, 10)
    assert emitted(generations) == expected(random, prompts, 10)
    assert sum(sum(generation.accepted) for generation in generations) <= 2


@pytest.mark.parametrize("limit", range(1, 11))
def test_max_new_tokens_is_exact(
    model: Qwen4ExpForCausalLM, decoder: Build, force_drafts: Forcing, limit: int
) -> None:
    """Also where a fully accepted step would go beyond it."""
    prompts = [safe_prompt(model, length, NEW) for length in (17, 30)]
    force_drafts(prompts, lambda step: 3)
    generations = run(decoder(3, max_requests=2), prompts, limit)
    assert emitted(generations) == [tokens[:limit] for tokens in expected(model, prompts, NEW)]


@pytest.mark.parametrize("position", range(10))
def test_a_stop_token_ends_a_request_wherever_it_falls(
    model: Qwen4ExpForCausalLM, decoder: Build, force_drafts: Forcing, position: int
) -> None:
    """As the first token, in the middle of an accepted run, as the bonus token."""
    prompt = safe_prompt(model, 30, NEW)
    tokens = continuation(model, prompt, NEW)
    stop = tokens[position]
    force_drafts([prompt], lambda step: 3)
    never = next(token for token in range(128) if token not in tokens)
    (generation,) = run(decoder(3), [prompt], NEW, stop=(never, stop))
    assert generation.tokens == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_prompt_may_fill_max_length_to_the_last_token(
    model: Qwen4ExpForCausalLM, decoder: Build, force_drafts: Forcing, num_draft_tokens: int
) -> None:
    """The rows of the last verification run past the end, and there is room for them."""
    prompts = [safe_prompt(model, 30, NEW), safe_prompt(model, 45, NEW)]
    force_drafts(prompts, lambda step: num_draft_tokens)
    generations = run(decoder(num_draft_tokens, max_length=45 + NEW, max_requests=2), prompts, NEW)
    assert emitted(generations) == expected(model, prompts, NEW)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_requests_join_as_rows_become_free(model: Qwen4ExpForCausalLM, decoder: Build, rows: int) -> None:
    """More prompts than rows, leaving at different times: each gets what it would get alone, in order."""
    lengths = (30, 3, 17, 45, 33, 34, 17)
    prompts = [safe_prompt(model, length, NEW, seed=i) for i, length in enumerate(lengths)]
    alone = expected(model, prompts, NEW)
    stops = (alone[0][20], alone[3][5])
    generations = run(decoder(3, max_requests=rows), prompts, NEW, stop=stops)
    for generation, tokens in zip(generations, alone, strict=True):
        end = min((tokens.index(stop) + 1 for stop in stops if stop in tokens), default=NEW)
        assert generation.tokens == tokens[:end]
    assert len({len(generation.tokens) for generation in generations}) > 1


def test_a_decoder_serves_one_call_after_another(model: Qwen4ExpForCausalLM, decoder: Build) -> None:
    prompts = [safe_prompt(model, length, NEW) for length in (30, 17)]
    shared = decoder(3)
    for prompt in (*prompts, *prompts):
        (generation,) = run(shared, [prompt], NEW)
        assert generation.tokens == continuation(model, prompt, NEW)


def test_no_prompts_give_no_generations(decoder: Build) -> None:
    assert run(decoder(3), [], 5) == []


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("fp16", None),
        ("e4m3", None),
        ("e4m3", "fp16"),
        ("fp16", "e4m3"),
        ("int8", None),
        ("int8", "fp16"),
        ("int8", "e3m4"),
        ("e5m2", "int8"),
    ],
)
def test_speculation_is_lossless_within_a_format(
    model: Qwen4ExpForCausalLM, decoder: Build, target: str, draft: str | None
) -> None:
    """Verification keeps the output that of the target in its own format, whatever the draft's."""
    prompts = [safe_prompt(model, length, NEW) for length in LENGTHS]
    options = {**formats(target, draft), "max_requests": 4}
    plain = run(decoder(0, **options), prompts, NEW)
    speculative = run(decoder(3, **options), prompts, NEW)
    assert emitted(speculative) == emitted(plain)
    assert sum(sum(generation.accepted) for generation in speculative) > 0


@pytest.mark.parametrize("kv_format", ["e4m3", "int8"])
def test_a_batch_and_its_chunks_do_not_matter_in_byte_formats(
    model: Qwen4ExpForCausalLM, decoder: Build, kv_format: str
) -> None:
    """What a token is stored as depends on the token alone, not on which others are written with it."""
    prompts = [safe_prompt(model, length, NEW) for length in LENGTHS]
    options = formats(kv_format, None)
    alone = [emitted(run(decoder(3, **options), [prompt], NEW))[0] for prompt in prompts]
    for chunk in (5, 16, 64):
        together = run(decoder(3, max_requests=4, prefill_chunk=chunk, **options), prompts, NEW)
        assert emitted(together) == alone


def formats(target: str, draft: str | None) -> dict[str, Any]:
    """Options of a decoder: the formats, and scales where they need some."""
    target_needs, draft_needs = (get_format(name).needs_scale for name in (target, draft or target))
    scales = KVScales(SCALES.target if target_needs else (), SCALES.draft if draft_needs else None)
    return {"kv_format": target, "draft_kv_format": draft, "scales": scales}


def test_wrong_requests_are_refused(decoder: Build) -> None:
    for prompts, new, message in (
        ([[1, 2]], 0, "max_new_tokens is 0, expected at least 1"),
        ([[1], [1] * 100], 29, "prompt 1: the prompt has 100 tokens and 29 more are asked for, max_length"),
        ([[]], 5, "the prompt is empty, expected at least one token"),
        ([[1, 128]], 5, r"the prompt holds a token id outside 0..127"),
        ([[-1, 1]], 5, r"the prompt holds a token id outside 0..127"),
    ):
        with pytest.raises(InputError, match=message):
            generate(decoder(3), prompts, new)


def test_a_refused_prompt_leaves_nothing_behind(model: Qwen4ExpForCausalLM, decoder: Build) -> None:
    """Even one that is met while another is under way."""
    shared = decoder(3, max_requests=2)
    prompts = [safe_prompt(model, length, NEW) for length in (17, 45)]
    first, second = expected(model, prompts, NEW)
    stop = next(token for token in first if token not in second)
    with pytest.raises(InputError, match="the prompt is empty"):
        generate(shared, [*prompts, []], NEW, stop_token_ids=(stop,))
    assert emitted(run(shared, prompts, NEW)) == [first, second]
