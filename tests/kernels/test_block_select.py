"""Block selection: the exact top-k with its tie rule, and the plan that merges adjacent rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from page4.kernels.block_select import index_scores, select_blocks, union_plan
from page4.kernels.errors import InputError

INF = math.inf


def brute_force(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Sort every row by (score descending, index ascending); Python compares -0.0 and 0.0 as equal."""
    expected = torch.zeros(scores.shape, dtype=torch.bool)
    for row, (values, count) in enumerate(zip(scores.tolist(), visible.tolist(), strict=True)):
        order = sorted(range(count), key=lambda block: (-values[block], block))
        expected[row, order[: min(topk, count)]] = True
    return expected


def test_scores_equal_the_definition() -> None:
    torch.manual_seed(0)
    iq, compressed = torch.randn(300, 4, 16), torch.randn(37, 16)
    expected = torch.einsum("rhd,bd->rhb", iq.double(), compressed.double()).relu().sum(1) / 4.0
    scores = index_scores(iq[None], compressed[None])[0]
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


def test_scores_of_half_precision_keys_accumulate_in_fp32() -> None:
    iq, compressed = torch.full((1, 2, 64), 60.0).half(), torch.full((3, 64), 60.0).half()
    assert index_scores(iq[None], compressed[None])[0].tolist() == [
        [2 * 64 * 3600 / 8.0] * 3
    ]  # the products sum beyond FP16


def test_heads_that_point_away_score_exactly_zero() -> None:
    iq = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    scores = index_scores(iq[None], torch.tensor([[[-1.0, -2.0], [3.0, -5.0]]]))[0]
    assert scores[0, 0] == 0.0
    torch.testing.assert_close(scores[0, 1], torch.tensor(3.0 / math.sqrt(2)))


@pytest.mark.parametrize("rows", [0, 1, 128, 129])
def test_any_number_of_rows_is_scored(rows: int) -> None:
    assert index_scores(torch.ones(2, rows, 2, 4), torch.ones(2, 5, 4)).shape == (2, rows, 5)
    assert index_scores(torch.ones(2, rows, 2, 4), torch.ones(2, 0, 4)).shape == (2, rows, 0)


def test_every_request_is_scored_against_its_own_keys() -> None:
    torch.manual_seed(0)
    iq, compressed = torch.randn(3, 5, 2, 8), torch.randn(3, 9, 8)
    scores = index_scores(iq, compressed)
    for request in range(3):
        alone = index_scores(iq[request : request + 1], compressed[request : request + 1])[0]
        torch.testing.assert_close(scores[request], alone)


def test_wrong_score_inputs_are_refused() -> None:
    for compressed in (torch.ones(2, 5, 4), torch.ones(1, 5, 3), torch.ones(5, 4)):
        with pytest.raises(InputError):
            index_scores(torch.ones(1, 3, 2, 4), compressed)


@pytest.mark.parametrize("topk", [1, 3, 8, 40, 64])
@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_selection_equals_the_sorted_order(topk: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(0, levels, (200, 40), generator=generator).float()  # few levels: many ties
    visible = torch.randint(0, 41, (200,), generator=generator)
    assert torch.equal(select_blocks(scores, visible, topk), brute_force(scores, visible, topk))


def test_relu_scores_with_many_exact_zeros() -> None:
    torch.manual_seed(0)
    scores = torch.randn(300, 60).sub_(1.0).relu_()
    visible = torch.randint(0, 61, (300,))
    assert torch.equal(select_blocks(scores, visible, 20), brute_force(scores, visible, 20))


def test_signed_zeros_tie() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 1.0]])
    assert select_blocks(scores, torch.tensor([5]), 3).tolist() == [[True, True, False, False, True]]


@pytest.mark.parametrize("value", [0.0, -1.0, INF, -INF])
def test_a_row_of_equal_scores_selects_the_first_blocks(value: float) -> None:
    selected = select_blocks(torch.full((1, 9), value), torch.tensor([7]), 4)
    assert selected.tolist() == [[True] * 4 + [False] * 5]


def test_invisible_blocks_are_never_selected() -> None:
    scores = torch.zeros(3, 6)
    scores[:, 3:] = 100.0
    scores[2] = -INF
    selected = select_blocks(scores, torch.tensor([0, 3, 3]), 2)
    assert selected.tolist() == [[False] * 6, [True, True] + [False] * 4, [True, True] + [False] * 4]


def test_a_row_with_at_most_topk_blocks_selects_all_of_them() -> None:
    selected = select_blocks(torch.randn(3, 6), torch.tensor([1, 4, 6]), 6)
    assert selected.sum(1).tolist() == [1, 4, 6]


def test_selection_without_blocks_is_empty() -> None:
    assert select_blocks(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64), 4).shape == (2, 0)


@pytest.mark.parametrize(
    ("visible", "topk"), [([1, 2, 3], 2), ([1, 7], 2), ([-1, 2], 2), ([1, 2], 0)]
)  # fmt: skip
def test_wrong_selection_inputs_are_refused(visible: list[int], topk: int) -> None:
    with pytest.raises(InputError):
        select_blocks(torch.zeros(2, 6), torch.tensor(visible), topk)


def tokens_by_definition(selected: Tensor, position: int) -> list[int]:
    """Tokens that one row attends to: its selected blocks and its tail."""
    complete = (position + 1) // 4
    from_blocks = [4 * block + i for block in selected.nonzero().flatten().tolist() for i in range(4)]
    return from_blocks + list(range(4 * complete, position + 1))


@pytest.mark.parametrize("rows_per_group", [1, 3, 4, 8, 100])
@pytest.mark.parametrize("first_position", [0, 1, 2, 3, 50, 63])
def test_the_plan_gives_every_row_its_own_tokens(rows_per_group: int, first_position: int) -> None:
    torch.manual_seed(first_position)
    rows = 10
    positions = torch.arange(first_position, first_position + rows)
    visible = (positions + 1) // 4
    num_blocks = int(visible.max())  # the last row's tail block may lie beyond
    selected = select_blocks(torch.randn(rows, num_blocks).relu(), visible, 5)
    plan = union_plan(selected, positions, rows_per_group)

    assert plan.token_mask.shape[2:] == (rows_per_group, 4)
    assert plan.blocks.shape == plan.token_mask.shape[:2]
    for group in range(len(plan.counts)):
        count = int(plan.counts[group])
        blocks = plan.blocks[group, :count].tolist()
        assert blocks == sorted(set(blocks))
        assert (plan.blocks[group, count:] == -1).all()
        assert not plan.token_mask[group, count:].any()
        union: set[int] = set()
        for m in range(rows_per_group):
            row = group * rows_per_group + m
            seen = [
                4 * blocks[u] + i for u, i in plan.token_mask[group, :count, m].nonzero().tolist()
            ]  # fmt: skip
            expected = tokens_by_definition(selected[row], int(positions[row])) if row < rows else []
            assert seen == sorted(expected)
            union.update(token // 4 for token in expected)
        assert blocks == sorted(union)  # nothing is read that no row needs


def test_the_own_token_of_a_complete_block_is_not_forced() -> None:
    selected = torch.tensor([[True, False]])
    plan = union_plan(selected, torch.tensor([7]), 1)  # p + 1 = 8: no tail, block 1 was not selected
    assert plan.blocks.tolist() == [[0]]


def test_a_row_never_sees_tokens_after_its_position() -> None:
    plan = union_plan(torch.ones(1, 4, dtype=torch.bool), torch.tensor([5]), 1)
    assert plan.token_mask.flatten().nonzero().flatten().tolist() == list(range(6))


def test_padded_rows_read_nothing() -> None:
    selected = torch.tensor([[True], [False], [False]])
    plan = union_plan(selected, torch.tensor([4, -1, -1]), 2)
    assert plan.counts.tolist() == [2, 0]
    assert not plan.token_mask[0, :, 1].any()
    assert not plan.token_mask[1].any()


@pytest.mark.parametrize("rows_per_group", [1, 3, 4, 16])
def test_groups_do_not_span_requests(rows_per_group: int) -> None:
    """A batch's plan is the plans of its requests, one after the other, padded to one width."""
    torch.manual_seed(0)
    selected = torch.rand(3, 7, 12) < 0.4
    positions = torch.randint(0, 52, (3, 7))
    batch = union_plan(selected.flatten(0, 1), positions.flatten(), rows_per_group, requests=3)
    alone = [union_plan(s, p, rows_per_group) for s, p in zip(selected, positions, strict=True)]
    assert torch.equal(batch.counts, torch.cat([plan.counts for plan in alone]))
    start = 0
    for plan in alone:
        groups, width = plan.blocks.shape
        part = slice(start, start + groups)
        assert torch.equal(batch.blocks[part, :width], plan.blocks)
        assert torch.equal(batch.token_mask[part, :width], plan.token_mask)
        assert (batch.blocks[part, width:] == -1).all() and not batch.token_mask[part, width:].any()
        start += groups


def test_no_rows_make_an_empty_plan() -> None:
    plan = union_plan(torch.zeros(0, 5, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), 4)
    assert plan.blocks.shape == (0, 0)


def test_wrong_plan_inputs_are_refused() -> None:
    with pytest.raises(InputError):
        union_plan(torch.zeros(3, 5, dtype=torch.bool), torch.tensor([1, 2]), 4)
    with pytest.raises(InputError):
        union_plan(torch.zeros(2, 5, dtype=torch.bool), torch.tensor([1, 2]), 0)
    with pytest.raises(InputError):
        union_plan(torch.zeros(3, 5, dtype=torch.bool), torch.tensor([1, 2, 3]), 4, requests=2)
