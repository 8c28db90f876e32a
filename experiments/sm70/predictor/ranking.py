"""Which configuration to ship when nobody could measure any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

TIE = 0.15
"""Predictions closer than this cannot be told apart: the order of configurations was never checked."""

Candidate = TypeVar("Candidate")


def rank_predictions(candidates: Sequence[tuple[Candidate, float, int]]) -> list[Candidate]:
    """Candidates from the one to take on.

    All that are predicted less than 15 % slower than the fastest tie with it; of those, fewer registers come
    first, as they leave room where a prediction is wrong, and then the shorter time. The others follow,
    ranked likewise among themselves.

    Args:
        candidates: each with its predicted time and its registers per thread.
    """
    left = sorted(candidates, key=lambda item: item[1])
    ranked: list[Candidate] = []
    while left:
        fastest = left[0][1]
        tied = [item for item in left if item[1] < fastest * (1 + TIE)] or left[:1]
        ranked += [item[0] for item in sorted(tied, key=lambda item: (item[2], item[1]))]
        left = left[len(tied) :]
    return ranked
