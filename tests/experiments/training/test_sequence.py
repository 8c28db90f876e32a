"""The training forward pass computes what the inference path computes."""

from __future__ import annotations

import pytest
import torch

from page4.experiments.training.config import TINY
from page4.experiments.training.loop import build_model
from page4.experiments.training.sequence import SequenceModel
from page4.kvcache.cache import CacheConfig
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment


@pytest.fixture(scope="module")
def model() -> Qwen4ExpForCausalLM:
    torch.manual_seed(1)
    model = build_model(TINY)
    with torch.no_grad():  # a fresh model is too smooth to show a mistake
        for name, parameter in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("length", [24, 130])
def test_logits_equal_the_inference_path(model: Qwen4ExpForCausalLM, length: int) -> None:
    """Dense (shorter than the budget of 32) and sparse, with an end of document inside."""
    ids = torch.randint(1, 4096, (2, length), generator=torch.Generator().manual_seed(3))
    ids[0, length // 2] = 0
    sequence = SequenceModel(model, torch.float32)
    hidden, streams = sequence.trunk(sequence.begin(ids, sparse=True))
    expected = model(ids)
    torch.testing.assert_close(streams.view_as(expected.streams), expected.streams, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(
        model.head(hidden).view_as(expected.logits), expected.logits, rtol=2e-4, atol=2e-4
    )


def test_dense_mode_reads_every_token(model: Qwen4ExpForCausalLM) -> None:
    ids = torch.randint(1, 4096, (1, 130), generator=torch.Generator().manual_seed(4))
    sequence = SequenceModel(model, torch.float32)
    sparse, _ = sequence.trunk(sequence.begin(ids, sparse=True))
    dense, _ = sequence.trunk(sequence.begin(ids, sparse=False))
    torch.testing.assert_close(sparse[:32], dense[:32], rtol=1e-4, atol=1e-5)
    assert (sparse[64:] - dense[64:]).abs().max() > 1e-3


@pytest.mark.parametrize(("length", "steps"), [(24, 3), (101, 1)])
def test_draft_chain_equals_the_cached_draft_steps(
    model: Qwen4ExpForCausalLM, length: int, steps: int
) -> None:
    """Against rows fed one after another into a cache.

    Sparse chains agree at step 0 only: later steps choose their blocks at the root in training, at their own
    position at inference.
    """
    drafted = [17, 42]
    ids = torch.randint(1, 4096, (1, length + 1), generator=torch.Generator().manual_seed(5))
    sequence = SequenceModel(model, torch.float32)
    run = sequence.begin(ids[:, :length], sparse=True)
    _, streams = sequence.trunk(run)
    hidden, state, chain = sequence.first_draft(run, streams, ids[:, 1:])
    root = torch.tensor([length - 1])
    ours = [model.head(hidden[-1:])]
    state = state[-1:]
    for step, token in enumerate(drafted, start=1):
        hidden, state = sequence.next_draft(run, state, torch.tensor([token]), root, step, chain)
        ours.append(model.head(hidden))

    cache = model.new_cache(CacheConfig.unquantised(torch.float32, max_requests=1, max_tokens=256))
    request = cache.open()
    cache.reserve(request, length + 8)
    target = model.forward_rows(
        RowBatch.pack([Segment(request, 0, ids[0, :length], (0, 0), decode=False)], model.device), cache
    )
    draft = model.draft_rows(
        RowBatch.pack([Segment(request, 0, ids[0, 1:], (0, 0), decode=False)], model.device), target, cache
    )[-1:]
    theirs = [model.draft_logits(draft)]
    for step, token in enumerate(drafted, start=1):
        segment = Segment(request, length - 1 + step, torch.tensor([token]), (0, 0), decode=True)
        draft = model.draft_rows(RowBatch.pack([segment], model.device), draft, cache)
        theirs.append(model.draft_logits(draft))
    for a, b in zip(ours[:steps], theirs[:steps], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
