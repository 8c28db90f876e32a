"""Recurrent state under speculation: rejecting drafts is reading another slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from page4.kvcache.recurrent import ConvSlots, GatedDeltaSlots
from page4.model import Qwen4ExpForCausalLM
from tests.oracle.steps import Stepper, exact_cache
from tests.oracle.tiny import random_tokens

CPU = torch.device("cpu")
TOKENS = random_tokens(80, seed=21)
WRONG = [3, 1, 4, 1, 5, 9, 2, 6]


def states(stepper: Stepper) -> list[Tensor]:
    """All recurrent states of the request as its next step would read them."""
    request, position = torch.tensor([stepper.request]), torch.tensor([len(stepper.tokens)])
    return [
        slots.window(request, position)
        if isinstance(slots, ConvSlots)
        else slots.read(request, torch.tensor([stepper.read_slot]))
        for slots in stepper.cache.recurrent
    ]


def assert_same_states(a: Stepper, b: Stepper, tolerance: float) -> None:
    assert len(states(a)) == 6  # two delta-rule layers (matrix and convolution), two PLE convolutions
    for ours, theirs in zip(states(a), states(b), strict=True):
        assert (ours - theirs).abs().max() <= tolerance


@pytest.mark.parametrize(
    ("num_draft_tokens", "accepted"), [(k, a) for k in (1, 2, 3, 5, 7) for a in range(k + 1)]
)
def test_state_after_accepting_some_drafts_is_that_of_the_accepted_tokens(
    model: Qwen4ExpForCausalLM, num_draft_tokens: int, accepted: int
) -> None:
    """Compared with the state computed one token at a time, and with the logits that follow."""
    keep = accepted + 1
    speculative = Stepper(model, exact_cache(model, num_draft_tokens))
    sequential = Stepper(model)
    for stepper in (speculative, sequential):
        stepper.prefill(TOKENS[:25])
    rows = TOKENS[25 : 25 + keep] + WRONG[: num_draft_tokens - accepted]
    speculative.decode(rows, keep=keep)
    for token in TOKENS[25 : 25 + keep]:
        sequential.decode([token])
    assert_same_states(speculative, sequential, 1e-5)
    following = TOKENS[25 + keep : 27 + keep]
    difference = model.logits(speculative.decode(following)) - model.logits(sequential.decode(following))
    assert difference.abs().max() <= 1e-4


def test_many_rejections_in_a_row_do_not_drift(model: Qwen4ExpForCausalLM) -> None:
    speculative, sequential = Stepper(model, exact_cache(model, 3)), Stepper(model)
    for stepper in (speculative, sequential):
        stepper.prefill(TOKENS[:9])
    for accepted in (0, 3, 1, 0, 0, 2, 3, 1, 2, 0):
        start = len(speculative.tokens)
        true = TOKENS[start : start + accepted + 1]
        speculative.decode((true + WRONG)[:4], keep=accepted + 1)
        for token in true:
            sequential.decode([token])
    assert_same_states(speculative, sequential, 1e-5)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8])
def test_a_prefill_chunk_leaves_its_final_state_in_slot_0_whatever_its_length(
    model: Qwen4ExpForCausalLM, rows: int
) -> None:
    """Also when it has as many rows as a verify step; the phase says which it is."""
    chunked, sequential = Stepper(model), Stepper(model)
    for stepper in (chunked, sequential):
        stepper.prefill(TOKENS[:20])
    chunked.prefill(TOKENS[20 : 20 + rows])
    for token in TOKENS[20 : 20 + rows]:
        sequential.decode([token])
    assert chunked.read_slot == 0
    assert_same_states(chunked, sequential, 1e-4)


def test_a_new_request_starts_from_zero(model: Qwen4ExpForCausalLM) -> None:
    stepper = Stepper(model)
    stepper.prefill(TOKENS[:20])
    stepper.decode(TOKENS[20:24], keep=2)
    stepper.cache.close(stepper.request)
    fresh = Stepper(model, stepper.cache)
    assert fresh.request == stepper.request
    assert all(not slots.state[fresh.request].any() for slots in stepper.cache.recurrent)


def test_a_window_is_what_was_stored_for_the_positions_before() -> None:
    slots = ConvSlots(requests=2, rows=4, length=3, channels=1, dtype=torch.float32, device=CPU)
    request = torch.tensor([1])

    def store(position: int, *values: float) -> None:
        slots.store(request, torch.tensor([position]), torch.tensor(values).view(1, -1, 1))

    def window(position: int) -> list[float]:
        return slots.window(request, torch.tensor([position])).flatten().tolist()

    store(0, *range(1, 21))  # a prompt longer than the ring
    assert window(20) == [18, 19, 20]
    store(20, 21, -1, -2, -3)  # of these four rows one is kept
    assert window(21) == [19, 20, 21]
    store(21, 22, 23, 24, 25)  # the ring's places of the three before are untouched
    assert window(21) == [19, 20, 21] and window(25) == [23, 24, 25]
    assert not slots.state[0].any()


def test_before_the_text_a_window_is_zero_whatever_the_ring_holds() -> None:
    slots = ConvSlots(requests=1, rows=2, length=3, channels=1, dtype=torch.float32, device=CPU)
    slots.state.fill_(torch.nan)
    slots.store(torch.tensor([0]), torch.tensor([0]), torch.tensor([1.0, 2.0]).view(1, 2, 1))
    assert slots.window(torch.tensor([0]), torch.tensor([1])).flatten().tolist() == [0, 0, 1]


def test_padding_reads_and_writes_nothing_of_any_request() -> None:
    conv = ConvSlots(2, 3, 1, 1, torch.float32, CPU)
    slots = GatedDeltaSlots(requests=2, slots=3, heads=1, key_dim=1, value_dim=1, conv=conv, device=CPU)
    padding, position = torch.tensor([-1]), torch.tensor([5])
    conv.store(padding, position, torch.full((1, 3, 1), torch.nan))
    slots.store_rows(padding, torch.full((1, 3, 1, 1, 1), torch.nan))
    slots.store_final(padding, torch.full((1, 1, 1, 1), torch.nan))
    assert not conv.state[:2].any() and not slots.state[:2].any()


def test_delta_states_are_stored_per_row_or_once() -> None:
    conv = ConvSlots(2, 3, 1, 1, torch.float32, CPU)
    slots = GatedDeltaSlots(requests=2, slots=3, heads=1, key_dim=1, value_dim=1, conv=conv, device=CPU)
    slots.store_rows(torch.tensor([1]), torch.tensor([7.0, 8.0]).view(1, 2, 1, 1, 1))
    assert slots.state[1].flatten().tolist() == [7, 8, 0]
    assert slots.read(torch.tensor([1]), torch.tensor([1])).flatten().tolist() == [8]
    slots.store_final(torch.tensor([0]), torch.tensor(5.0).view(1, 1, 1, 1))
    assert slots.state[0].flatten().tolist() == [5, 0, 0]


def test_delta_states_are_fp32_whatever_the_activations(model: Qwen4ExpForCausalLM) -> None:
    for slots in exact_cache(model).recurrent:
        if isinstance(slots, GatedDeltaSlots):
            assert slots.state.dtype == torch.float32
