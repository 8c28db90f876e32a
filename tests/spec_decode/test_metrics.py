"""Acceptance, tokens per step and repetition, by hand-counted examples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from page4.spec_decode import acceptance_by_position, mean_acceptance, repeated_ngrams, tokens_per_step

ACCEPTED = [3, 0, 1, 3]


def test_acceptance_by_position() -> None:
    """Draft 1 is accepted in three of four verifications, drafts 2 and 3 in two."""
    assert acceptance_by_position(ACCEPTED, 3).tolist() == [0.75, 0.5, 0.5]


def test_mean_acceptance_is_accepted_over_drafted() -> None:
    assert mean_acceptance(ACCEPTED, 3) == pytest.approx(7 / 12)


def test_tokens_per_step_counts_the_targets_own_token() -> None:
    assert tokens_per_step(ACCEPTED) == 1 + 7 / 4
    assert tokens_per_step([0]) == 1


@given(st.lists(st.integers(0, 5), min_size=1))
def test_the_three_agree(accepted: list[int]) -> None:
    mean = mean_acceptance(accepted, 5)
    assert tokens_per_step(accepted) == pytest.approx(1 + 5 * mean)
    by_position = acceptance_by_position(accepted, 5)
    assert by_position.mean() == pytest.approx(mean)
    assert (np.diff(by_position) <= 0).all(), "a draft counts only when all before it were accepted"


def test_rounds_of_several_texts_count_alike() -> None:
    grid = np.array([[3, 0], [1, 3]])
    assert acceptance_by_position(grid, 3).tolist() == acceptance_by_position(ACCEPTED, 3).tolist()
    assert tokens_per_step(grid) == tokens_per_step(ACCEPTED)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], 0.0),
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 4], 0.0),
        (list(range(50)), 0.0),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], 1 / 6),  # the first 4-gram once more
        ([7] * 100, 96 / 97),  # one distinct 4-gram among 97
        ([1, 2] * 50, 95 / 97),
    ],
)
def test_repeated_ngrams_reveal_looping_text(tokens: list[int], expected: float) -> None:
    """Such text accepts every draft, which says nothing about a format."""
    assert repeated_ngrams(tokens) == pytest.approx(expected)


def test_the_length_of_the_ngram() -> None:
    assert repeated_ngrams([1, 1, 2, 1, 1], n=2) == pytest.approx(1 / 4)
