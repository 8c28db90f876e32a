"""Overlap of selections and distance of predictions, on cases that are worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from page4.experiments.quant_error.compare import flips, jaccard, kl_divergence, token_loss

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=5, max_size=5)


def test_jaccard_is_shared_over_all() -> None:
    a = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]).bool()
    b = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]]).bool()
    assert jaccard(a, b).tolist() == [1.0, 0.0, 0.5, 1.0]


def test_divergence_of_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    wanted = 0.5 * math.log(2) - 0.25 * math.log(2)
    # The logarithms come in FP32: each is off by up to 2^-24 of itself, at most 1.4.
    assert kl_divergence(p.log(), q.log()).item() == pytest.approx(wanted, abs=4 * 1.4 * 2.0**-24)
    assert kl_divergence(p.log() + 3, p.log()).item() == pytest.approx(0, abs=4 * 2.0**-22)


def test_small_divergences_are_not_lost() -> None:
    """Of half a nudge, to second order the variance of the nudge over 2; FP32 logarithms would drown it."""
    logits = torch.tensor([[8.0, 0.0]], dtype=torch.float64)
    p = torch.softmax(logits, -1)[0, 0].item()
    nudge = 1e-5
    found = kl_divergence(logits, logits + torch.tensor([[nudge, 0.0]])).item()
    assert found == pytest.approx(p * (1 - p) * nudge**2 / 2, rel=nudge * 10)


@settings(max_examples=50)
@given(LOGITS, LOGITS)
def test_divergence_is_never_negative_and_only_zero_of_equals(a: list[float], b: list[float]) -> None:
    x, y = torch.tensor([a]), torch.tensor([b])
    assert kl_divergence(x, y).item() >= 0
    assert kl_divergence(x, x).item() == 0


def test_a_flip_is_another_most_likely_token() -> None:
    a, b = torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([[0.5, 0.9], [0.0, 1.0]])
    assert flips(a, b).tolist() == [False, True]


def test_loss_is_what_the_true_token_was_not_expected_by() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.25, 0.625]], dtype=torch.float64)
    found = token_loss(p.log() + torch.tensor([[3.0], [-50.0]]), torch.tensor([1, 0]))
    assert found.tolist() == pytest.approx([math.log(4), math.log(8)], rel=1e-12)


def test_small_losses_are_not_lost() -> None:
    """Of a token that is all but certain: to second order what is left to the others, under FP32's 2^-24."""
    found = token_loss(torch.tensor([[20.0, 0.0]]), torch.tensor([0])).item()
    assert found == pytest.approx(math.exp(-20), rel=math.exp(-20))
