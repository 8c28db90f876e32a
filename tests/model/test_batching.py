"""Requests of different lengths and phases that share a step get what each would get alone."""

from __future__ import annotations

import pytest
import torch

from page4.model import Qwen4ExpForCausalLM, RowBatch
from tests.oracle.steps import Stepper, exact_cache
from tests.oracle.tiny import random_tokens, tiny_model

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Qwen4ExpForCausalLM:
    return tiny_model(seed=1, num_hidden_layers=4, ple_layer_ids=[1, 2])


# For each request: tokens in the cache before the shared step, rows in the step, and the phase of those rows.
STEPS = {
    "prefills": [(0, 23, False), (16, 31, False), (0, 5, False)],
    "decodes": [(33, 1, True), (7, 1, True), (64, 1, True)],
    "verify rows": [(33, 4, True), (7, 4, True), (64, 4, True)],
    "verify rows of several K": [(33, 4, True), (7, 2, True), (64, 8, True)],
    "prefill tail beside decodes": [(48, 46, False), (21, 1, True), (30, 1, True), (40, 1, True)],
    "prefill of as many rows as a verify step": [(16, 4, False), (21, 4, True), (0, 4, False), (30, 4, True)],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_a_shared_step_equals_steps_alone(
    model: Qwen4ExpForCausalLM, step: list[tuple[int, int, bool]]
) -> None:
    cache = exact_cache(model, max_requests=len(step))
    together = [Stepper(model, cache) for _ in step]
    alone = [Stepper(model) for _ in step]
    segments, expected = [], []
    for i, (before, rows, decode) in enumerate(step):
        tokens = random_tokens(before + rows, seed=i)
        for stepper in (together[i], alone[i]):
            if before:
                stepper.prefill(tokens[:before])
        segments.append(together[i].segment(tokens[before:], decode))
        expected.append((alone[i].decode if decode else alone[i].prefill)(tokens[before:]))
    batch = RowBatch.pack(segments, model.device)
    streams = model.forward_rows(batch, cache)
    for i, stepper in enumerate(together):
        own = streams[batch.rows(stepper.request)]
        assert (own - expected[i]).abs().max() <= TOLERANCE
        assert (model.logits(own) - model.logits(expected[i])).abs().max() <= TOLERANCE

    # And the states they leave behind serve the next step as well.
    for i, (_, rows, decode) in enumerate(step):
        together[i].tokens = list(alone[i].tokens)
        together[i].read_slot = rows - 1 if decode else 0
        difference = together[i].decode([7, 8]) - alone[i].decode([7, 8])
        assert difference.abs().max() <= TOLERANCE


def test_forward_takes_a_batch_of_equal_lengths(model: Qwen4ExpForCausalLM) -> None:
    ids = torch.tensor([random_tokens(37, seed) for seed in range(3)])
    together = model(ids)
    for i in range(3):
        alone = model(ids[i : i + 1])
        assert (together.logits[i] - alone.logits[0]).abs().max() <= TOLERANCE
        assert (together.streams[i] - alone.streams[0]).abs().max() <= TOLERANCE


def test_forward_refuses_ids_without_batch_or_tokens(model: Qwen4ExpForCausalLM) -> None:
    for ids in (torch.tensor([1, 2]), torch.empty(1, 0, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"expected \[batch, tokens\]"):
            model(ids)
