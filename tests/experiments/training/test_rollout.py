"""Batched decoding continues a prefix as the full forward pass would."""

from __future__ import annotations

import torch

from page4.experiments.training.config import TINY
from page4.experiments.training.loop import build_model
from page4.experiments.training.rollout import rollouts
from page4.experiments.training.sequence import SequenceModel


def test_greedy_rollouts_are_the_argmax_of_a_full_pass() -> None:
    """Through convolution, delta-rule, PLE and attention state; 31 tokens stay within the budget of 32."""
    torch.manual_seed(2)
    model = build_model(TINY).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias")):
            parameter.add_(torch.randn_like(parameter) * 0.05)
    sequence = SequenceModel(model, torch.float32)
    prefix = torch.randint(1, 4096, (3, 16))
    prefix[1, 7] = 0
    tokens = rollouts(sequence, prefix, 31, torch.zeros(3))
    assert tokens.shape == (3, 31) and tokens[:, :16].equal(prefix)
    hidden, _ = sequence.trunk(sequence.begin(tokens, sparse=False))
    chosen = model.head(hidden).argmax(-1).view(3, 31)
    assert tokens[:, 16:].equal(chosen[:, 15:-1])


def test_temperature_changes_only_its_own_sequences() -> None:
    torch.manual_seed(3)
    sequence = SequenceModel(build_model(TINY).requires_grad_(False), torch.float32)
    prefix = torch.randint(1, 4096, (1, 16)).expand(2, -1)
    cold = rollouts(sequence, prefix, 24, torch.zeros(2))
    mixed = rollouts(sequence, prefix, 24, torch.tensor([0.0, 1.0]))
    assert mixed[0].equal(cold[0]) and not mixed[1].equal(cold[1])
