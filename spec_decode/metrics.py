"""What is reported about speculation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def acceptance_by_position(accepted: ArrayLike, num_draft_tokens: int) -> NDArray[np.float64]:
    """Fraction of verifications that accepted draft j, for j = 1..K: ``mean(accepted >= j)``, ``[K]``."""
    counts = np.asarray(accepted).reshape(-1, 1)
    return (counts >= np.arange(1, num_draft_tokens + 1)).mean(axis=0)


def mean_acceptance(accepted: ArrayLike, num_draft_tokens: int) -> float:
    """Accepted over drafted tokens."""
    return float(np.mean(np.asarray(accepted) / num_draft_tokens))


def tokens_per_step(accepted: ArrayLike) -> float:
    """Tokens a verification emits: ``1 + K * acceptance``."""
    return 1.0 + float(np.mean(np.asarray(accepted)))


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Fraction of n-grams that occurred before in ``tokens``; 0 for texts shorter than n.

    Looping text accepts everything: an acceptance from a sample with many repeats says nothing about formats.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
