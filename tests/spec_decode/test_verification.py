"""What verification accepts: a prefix of right drafts, all of it, nothing more, and one token of its own."""

from __future__ import annotations

import pytest
import torch

from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import choosing, generate
from tests.spec_decode.conftest import Build, Forcing
from tests.spec_decode.reference import continuation, emitted, expected, run, safe_prompt

NEW = 24
LENGTHS = (3, 17, 30, 45)


@pytest.mark.parametrize("position", range(4))
def test_a_draft_of_minus_1_ends_the_accepted_prefix(
    model: Qwen4ExpForCausalLM, decoder: Build, force_drafts: Forcing, position: int
) -> None:
    """Neither embedded nor compared, wherever it stands; later drafts, though right, are not accepted."""
    prompts = [safe_prompt(model, length, NEW) for length in (17, 30)]
    force_drafts(prompts, lambda step: position, wrong=-1)
    generations = run(decoder(4, max_requests=2), prompts, NEW)
    assert emitted(generations) == expected(model, prompts, NEW)
    for generation in generations:
        assert set(generation.accepted) == {position}


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5, 7])
def test_all_drafts_accepted_emit_k_plus_1_tokens_a_step(
    model: Qwen4ExpForCausalLM, decoder: Build, force_drafts: Forcing, num_draft_tokens: int
) -> None:
    prompt = safe_prompt(model, 17, NEW)
    force_drafts([prompt], lambda step: num_draft_tokens)
    (generation,) = run(decoder(num_draft_tokens), [prompt], NEW)
    steps = -(-(NEW - 1) // (num_draft_tokens + 1))  # the first token comes from a step without drafts
    assert generation.accepted == [num_draft_tokens] * steps
    assert generation.tokens == continuation(model, prompt, NEW)


def test_the_first_draft_is_verified_too(
    model: Qwen4ExpForCausalLM, decoder: Build, force_drafts: Forcing
) -> None:
    prompt = safe_prompt(model, 17, NEW)
    force_drafts([prompt], lambda step: 0)
    (generation,) = run(decoder(3), [prompt], NEW)
    assert generation.accepted == [0] * (NEW - 1)
    assert generation.tokens == continuation(model, prompt, NEW)


def test_without_drafts_every_step_emits_one_token(model: Qwen4ExpForCausalLM, decoder: Build) -> None:
    prompt = safe_prompt(model, 17, NEW)
    generations, stats = generate(decoder(0), [prompt], NEW)
    assert generations[0].accepted == [0] * (NEW - 1)
    # The first of them in the step that prefilled, too.
    assert stats.decode_tokens == len(stats.step_seconds) == NEW - 1
    assert stats.prefill_tokens == 16, "the last one of the prompt is a decode step's"


def test_comparing_with_plain_decoding_exposes_a_corrupted_verifier(
    model: Qwen4ExpForCausalLM, decoder: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that accepts everything reports an acceptance of 1 and emits something else."""

    def accept_all(target_tokens: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = torch.full((drafts.shape[0],), drafts.shape[1])
        return count, torch.cat([drafts, target_tokens[:, -1:]], dim=1)

    prompts = [safe_prompt(model, length, NEW) for length in LENGTHS]
    monkeypatch.setattr(choosing, "verify_greedy_reference", accept_all)
    generations = run(decoder(3, max_requests=4), prompts, NEW)
    assert {count for generation in generations for count in generation.accepted} == {3}
    assert emitted(generations) != [continuation(model, prompt, NEW) for prompt in prompts]
