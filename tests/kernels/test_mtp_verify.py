"""Greedy verification: what is accepted, what is emitted."""

from __future__ import annotations

import pytest
import torch

from page4.kernels.errors import InputError
from page4.kernels.mtp_verify import verify_greedy_reference


def verify_one(target: list[int], drafts: list[int]) -> tuple[int, list[int]]:
    accepted, emitted = verify_greedy_reference(
        torch.tensor([target]), torch.tensor([drafts], dtype=torch.int64).view(1, len(drafts))
    )
    return int(accepted), emitted[0].tolist()


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5])
def test_every_accept_count(num_drafts: int) -> None:
    target = list(range(10, 11 + num_drafts))
    for expected in range(num_drafts + 1):
        drafts = target[:num_drafts]
        if expected < num_drafts:
            drafts[expected] = 99  # the first wrong draft; those after it are right again
        accepted, emitted = verify_one(target, drafts)
        assert accepted == expected
        assert emitted == target[: expected + 1] + [-1] * (num_drafts - expected)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_missing_draft_ends_the_prefix(position: int) -> None:
    drafts = [5, 6, 7]
    drafts[position] = -1
    accepted, emitted = verify_one([5, 6, 7, 8], drafts)
    assert accepted == position
    assert emitted[: position + 1] == [5, 6, 7][: position + 1]


def test_a_missing_draft_never_equals_a_missing_target() -> None:
    assert verify_one([-1, -1], [-1]) == (0, [-1, -1])


def test_all_accepted_emits_the_bonus_token() -> None:
    assert verify_one([1, 2, 3, 4], [1, 2, 3]) == (3, [1, 2, 3, 4])


def test_the_first_draft_is_verified() -> None:
    assert verify_one([1, 2, 3, 4], [9, 2, 3]) == (0, [1, -1, -1, -1])


def test_without_drafts_one_token_is_emitted() -> None:
    assert verify_one([7], []) == (0, [7])


def test_requests_are_independent() -> None:
    torch.manual_seed(0)
    target, drafts = torch.randint(0, 2, (500, 5)), torch.randint(-1, 2, (500, 4))
    accepted, emitted = verify_greedy_reference(target, drafts)
    for row in range(500):
        count = 0
        while count < 4 and drafts[row, count] == target[row, count]:
            count += 1
        assert accepted[row] == count
        assert emitted[row].tolist() == target[row, : count + 1].tolist() + [-1] * (4 - count)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match="target_tokens"):
        verify_greedy_reference(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
