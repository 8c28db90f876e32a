"""How far two selections and two predictions are apart, and predictions from the text, row by row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def jaccard(a: Tensor, b: Tensor) -> Tensor:
    """Blocks that both chose over blocks that either chose; 1 where neither chose any.

    Shapes: bool `[N, blocks]`; returns float64 `[N]`.
    """
    both, either = (a & b).sum(-1).double(), (a | b).sum(-1).double()
    return torch.where(either == 0, 1.0, both / either)


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) in nats, of the distributions that two rows of logits stand for.

    In float64: the divergences of good formats are smaller than what FP32 logarithms lose.

    Shapes: `[N, V]`; returns float64 `[N]`.
    """
    log_p, log_q = (torch.log_softmax(logits.double(), dim=-1) for logits in (reference, other))
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)


def flips(reference: Tensor, other: Tensor) -> Tensor:
    """Where the most likely token is another one.

    Shapes: `[N, V]`; returns bool `[N]`.
    """
    return reference.argmax(-1) != other.argmax(-1)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of the tokens that follow, in nats.

    In float64, as the divergence is: what a good format adds to it is small.

    Shapes: `[N, V]` and int64 `[N]`; returns float64 `[N]`.
    """
    return F.cross_entropy(logits.double(), targets, reduction="none")
