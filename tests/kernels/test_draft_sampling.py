"""Drafts follow the distribution that is stored for their verification."""

from __future__ import annotations

import math

import pytest
import torch

from page4.kernels.draft_sampling import DraftDistributions, sample_drafts_reference
from page4.kernels.errors import InputError
from page4.kernels.sampling_params import SamplingParams
from page4.kernels.token_weights import row_totals

from .sampling_cases import follows, probabilities

DRAWS = 100_000


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_drafts_follow_the_softmax(temperature: float, vary: str) -> None:
    logits = torch.randn(11, generator=torch.Generator().manual_seed(1))
    count = torch.arange(DRAWS)
    params = SamplingParams.of(
        [1.0] * DRAWS,
        draft_temperature=[temperature] * DRAWS,
        seed=count.tolist() if vary == "seed" else [9] * DRAWS,
    )
    positions = torch.full_like(count, 5) if vary == "seed" else count
    store = DraftDistributions.empty(logits.expand(DRAWS, -1), 1)
    tokens = sample_drafts_reference(logits.expand(DRAWS, -1), positions, params, store)
    assert follows(tokens, probabilities(logits, temperature))
    assert not follows(tokens, probabilities(logits, 1.1 * temperature))


def test_large_vocabularies_are_drawn_across_tiles() -> None:
    logits = torch.full((3000,), -20.0)
    logits[[3, 1024, 2047, 2999]] = torch.tensor([1.0, 2.0, 1.5, 0.5])
    params = SamplingParams.of([1.0] * 500, draft_temperature=[1.0] * 500)
    rows = logits.expand(500, -1)
    tokens = torch.cat(
        [
            sample_drafts_reference(
                rows, torch.arange(first, first + 500), params, DraftDistributions.empty(rows, 1)
            )
            for first in range(0, 20_000, 500)
        ]
    )
    assert follows(tokens, probabilities(logits, 1.0))


def test_what_is_stored_is_what_was_sampled_from() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)).half()
    params = SamplingParams.of([0.0] * 3, draft_temperature=[0.7, 0.0, 1.0], seed=[1, 2, 3])
    store = DraftDistributions.empty(logits, 2)
    tokens = sample_drafts_reference(logits, torch.tensor([4, 4, -1]), params, store, step=1)
    assert tokens[1] == logits[1].argmax() and tokens[2] == -1
    assert torch.equal(store.logits[0, 1], logits[0])
    assert store.scale[0, 1] == params.draft_scale[0] and store.scale[1, 1] == 0
    assert store.maximum[0, 1] == logits[0].max()
    assert store.total[0, 1] == row_totals(logits[:1], store.scale[:1, 1]).total
    # Nothing of other drafts, of greedy ones or of padded requests.
    assert not store.logits[:, 0].any() and not store.logits[1:].any()


def test_ties_of_a_greedy_draft_go_to_the_lower_token() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0], [-1.0, -0.0, 0.0, -1.0]])
    assert sample_drafts_reference(logits, torch.tensor([0, 0]), SamplingParams.of([0.0] * 2)).tolist() == [
        1,
        1,
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_a_distribution_nothing_is_drafted(temperature: float) -> None:
    logits = torch.zeros(3, 5)
    logits[0, 1], logits[1] = math.nan, -math.inf
    params = SamplingParams.of([1.0] * 3, draft_temperature=[temperature] * 3)
    tokens = sample_drafts_reference(
        logits, torch.tensor([7, 7, 7]), params, DraftDistributions.empty(logits, 1)
    )
    assert tokens[:2].tolist() == [-1, -1] and tokens[2] >= 0


def test_wrong_inputs_are_refused() -> None:
    logits, positions = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    sampled = SamplingParams.of([1.0] * 2, draft_temperature=[1.0] * 2)
    store = DraftDistributions.empty(logits, 2)
    with pytest.raises(InputError, match="store their distributions"):
        sample_drafts_reference(logits, positions, sampled)
    with pytest.raises(InputError, match="float16"):
        sample_drafts_reference(logits.half(), positions, sampled, store)
    with pytest.raises(InputError, match="step 2"):
        sample_drafts_reference(logits, positions, sampled, store, 2)
    with pytest.raises(InputError, match="positions"):
        sample_drafts_reference(logits, positions[:1], sampled, store)
    with pytest.raises(InputError, match="2 requests, logits for 1"):
        sample_drafts_reference(logits[:1], positions[:1], sampled, store)
    with pytest.raises(InputError, match="stored logits"):
        sample_drafts_reference(logits[:, :4], positions, sampled, store)
