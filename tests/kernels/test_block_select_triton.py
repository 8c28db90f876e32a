"""Selection and the union plan in Triton: the same lists and mask words as the reference, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from page4.experiments.sm70.compiling import CAPABILITIES, compile_for
from page4.kernels.block_plan import PackedPlan, RowGroups, pack_plan, plan_capacity
from page4.kernels.block_select import select_blocks, union_plan
from page4.kernels.block_select_triton import (
    SelectionWorkspace,
    empty_plan,
    plan_kernel,
    select_kernel,
    select_plan_triton,
)
from page4.kernels.errors import InputError

from .attention_cases import DEVICE

SENTINEL = -77


def row_groups(row_counts: list[int], rows_per_group: int, groups: int | None = None) -> RowGroups:
    return RowGroups.of(row_counts, rows_per_group, groups=groups, device=DEVICE)


def new_workspace(rows: int, max_blocks: int, topk: int, **options: int) -> SelectionWorkspace:
    """A workspace with garbage wherever a launch may not rely on what it finds."""
    workspace = SelectionWorkspace.allocate(rows, max_blocks, topk, device=DEVICE, **options)
    for tensor in (workspace.bits, workspace.keys, workspace.blocks):
        tensor.fill_(-1)
    return workspace


def group_lists(plan: PackedPlan) -> list[tuple[list[int], list[int]]]:
    """Listed blocks and masks of every group."""
    return [
        (plan.blocks[group, :count].tolist(), plan.masks[group, :count].tolist())
        for group, count in enumerate(plan.counts.tolist())
    ]


def expected_lists(
    scores: Tensor, positions: Tensor, row_counts: list[int], topk: int, rows_per_group: int
) -> list[tuple[list[int], list[int]]]:
    """The reference's plans of the requests, one after the other."""
    lists = []
    for s, p in zip(scores.split(row_counts), positions.split(row_counts), strict=True):
        selected = select_blocks(s, (p + 1) // 4, topk)
        lists += group_lists(pack_plan(union_plan(selected, p, rows_per_group), len(p)))
    return lists


def planned(
    scores: Tensor, positions: Tensor, groups: RowGroups, topk: int, max_chunk: int = 64
) -> PackedPlan:
    """A plan over poisoned memory: scores that no row may look at are NaN."""
    num_blocks = scores.shape[1]
    scores, positions = scores.to(DEVICE), positions.to(DEVICE)
    invisible = torch.arange(num_blocks, device=DEVICE) >= ((positions + 1) // 4)[:, None]
    workspace = new_workspace(len(scores), num_blocks + 1, topk, max_chunk=max_chunk)
    plan = empty_plan(groups, plan_capacity(groups.rows_per_group, topk, num_blocks + 1))
    for tensor in (plan.blocks, plan.masks, plan.counts):
        tensor.fill_(SENTINEL)
    select_plan_triton(scores.masked_fill(invisible, math.nan), positions, groups, workspace, plan)
    assert (workspace.arrivals == 0).all()  # ready for the next step
    for group, count in enumerate(plan.counts.tolist()):
        assert (plan.blocks[group, count:] == SENTINEL).all()
        assert (plan.masks[group, count:] == SENTINEL).all()
    return plan


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    row_counts=st.lists(st.integers(0, 9), min_size=1, max_size=2).filter(any),
    num_blocks=st.integers(1, 150),
    topk=st.sampled_from([1, 8, 31]),
    levels=st.sampled_from([1, 2, 4, 10**6]),
    rows_per_group=st.sampled_from([1, 3, 4, 8]),
    max_chunk=st.sampled_from([32, 256]),
    padding=st.integers(0, 2),
)
def test_the_plan_equals_the_reference(
    seed: int,
    row_counts: list[int],
    num_blocks: int,
    topk: int,
    levels: int,
    rows_per_group: int,
    max_chunk: int,
    padding: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(row_counts)
    scores = torch.randint(0, levels, (rows, num_blocks), generator=generator).float() / levels
    scores[torch.rand(scores.shape, generator=generator) < 0.1] *= -0.0
    lengths = torch.randint(1, 4 * num_blocks + 4, (len(row_counts),), generator=generator).tolist()
    positions = torch.cat(
        [torch.arange(length - count, length) for length, count in zip(lengths, row_counts, strict=True)]
    ).clamp_min(-1)  # a length below the row count: padded rows
    total = sum(-(-count // rows_per_group) for count in row_counts)
    groups = row_groups(row_counts, rows_per_group, groups=total + padding)

    plan = planned(scores, positions, groups, topk, max_chunk)
    expected = expected_lists(scores, positions, row_counts, topk, rows_per_group)
    assert group_lists(plan) == expected + [([], [])] * padding


@pytest.mark.parametrize("tail", [0, 1, 3])
@pytest.mark.parametrize("visible", [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_rows_that_end_at_the_edges_of_words_and_chunks(visible: int, tail: int) -> None:
    """The tail block may be the first of a chunk in which the row sees no complete block."""
    if visible + tail == 0:
        return
    scores = torch.arange(130.0).flip(0)[None] % 7
    positions = torch.tensor([4 * visible + tail - 1])
    plan = planned(scores, positions, row_groups([1], 1), topk=20, max_chunk=32)
    assert group_lists(plan) == expected_lists(scores, positions, [1], 20, 1)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.5, 1e-40, math.inf, -math.inf])
@pytest.mark.parametrize("max_chunk", [32, 128])
def test_equal_scores_select_the_first_blocks(value: float, max_chunk: int) -> None:
    plan = planned(torch.full((1, 100), value), torch.tensor([399]), row_groups([1], 1), 17, max_chunk)
    assert plan.blocks[0, :17].tolist() == list(range(17))
    assert plan.counts.tolist() == [17]


def test_signed_zeros_tie() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 1.0, -1.0]])
    plan = planned(scores, torch.tensor([23]), row_groups([1], 1), topk=3)
    assert plan.blocks[0, :3].tolist() == [0, 1, 4]


@pytest.mark.parametrize("max_chunk", [32, 128])
def test_scores_of_both_signs_and_all_magnitudes(max_chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-140, 128, (4, 120), generator=generator).double()
    scores = (2.0**exponents * torch.randn(4, 120, generator=generator)).float()
    scores[:, ::17] = -math.inf
    positions = torch.arange(470, 474)
    plan = planned(scores, positions, row_groups([4], 4), 40, max_chunk)
    assert group_lists(plan) == expected_lists(scores, positions, [4], 40, 4)


@pytest.mark.parametrize("max_chunk", [512, 2048])
def test_512_of_many_blocks(max_chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 1500, generator=generator).relu()
    scores[1] = scores[1].round(decimals=1)
    positions = torch.arange(5990, 5994)
    plan = planned(scores, positions, row_groups([4], 4), 512, max_chunk)
    assert group_lists(plan) == expected_lists(scores, positions, [4], 512, 4)


def test_more_words_than_one_program_lists() -> None:
    scores = torch.zeros(2, 70_000)
    scores[0, 69_000:69_100] = 1.0
    scores[1, 40_000:40_050] = 2.0
    positions = torch.tensor([4 * 70_000 - 2, 4 * 70_000 - 1])
    groups = row_groups([2], 2)
    workspace = new_workspace(2, 70_000, 64)
    plan = select_plan_triton(scores.to(DEVICE), positions.to(DEVICE), groups, workspace)
    assert group_lists(plan) == expected_lists(scores, positions, [2], 64, 2)


def test_a_workspace_and_a_plan_serve_step_after_step() -> None:
    generator = torch.Generator().manual_seed(0)
    workspace = new_workspace(8, 120, 9, max_chunk=32)
    groups = row_groups([4, 2], 4)
    plan = empty_plan(groups, plan_capacity(4, 9, 120))
    for length in (470, 20, 130, 300):
        positions = torch.cat([torch.arange(length - 4, length), torch.arange(length // 2, length // 2 + 2)])
        scores = torch.rand(6, 120, generator=generator)
        select_plan_triton(scores.to(DEVICE), positions.to(DEVICE), groups, workspace, plan)
        assert group_lists(plan) == expected_lists(scores, positions, [4, 2], 9, 4)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1, -(2**31) + 0x7FC00000])
def test_a_nan_takes_a_place_but_never_hangs_or_overflows(bits: int) -> None:
    """A NaN is refused by contract; the GPU must survive one all the same."""
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    scores = torch.rand(1, 100)
    scores[0, ::3] = nan
    plan = planned(scores, torch.tensor([399]), row_groups([1], 1), 17, 32)
    assert plan.counts.tolist() == [17]


def test_no_rows_make_an_empty_plan() -> None:
    groups = row_groups([], 4)
    workspace = SelectionWorkspace.allocate(1, 4, 2)
    plan = select_plan_triton(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), groups, workspace)
    assert plan.counts.shape == (0,)


def test_wrong_inputs_are_refused() -> None:
    groups, workspace = row_groups([2], 2), SelectionWorkspace.allocate(2, 8, 3)
    positions, scores = torch.tensor([20, 21]), torch.zeros(2, 8)
    for wrong in (scores[:1], scores.half(), torch.zeros(8, 2).t(), scores[0]):
        with pytest.raises(InputError, match="scores"):
            select_plan_triton(wrong, positions, groups, workspace)
    with pytest.raises(InputError, match="workspace serves 1"):
        select_plan_triton(scores, positions, groups, SelectionWorkspace.allocate(1, 8, 3))
    with pytest.raises(InputError, match="8 may be listed"):
        select_plan_triton(scores, positions, groups, workspace, empty_plan(groups, 7))
    with pytest.raises(InputError, match="groups"):
        select_plan_triton(scores, positions, groups, workspace, empty_plan(row_groups([1, 1], 1), 8))
    for topk in (0, 513):
        with pytest.raises(InputError, match="topk"):
            SelectionWorkspace.allocate(1, 8, topk)
    with pytest.raises(InputError, match="max_blocks"):
        SelectionWorkspace.allocate(1, 0, 3)
    for chunk in (16, 48):
        with pytest.raises(InputError, match="max_chunk"):
            SelectionWorkspace.allocate(1, 8, 3, max_chunk=chunk)


SELECT_SIGNATURE = {
    "p_scores": "*fp32", "stride_scores": "i32:16", "columns": "i32:16", "p_positions": "*i64",
    "p_bits": "*i32", "words": "i32:16", "p_keys": "*i32", "p_blocks": "*i32", "p_arrivals": "*i32",
    "topk": "i32",
}  # fmt: skip
PLAN_SIGNATURE = {
    "p_bits": "*i32", "words": "i32:16", "p_positions": "*i64", "p_group_start": "*i32",
    "p_group_rows": "*i32", "p_blocks": "*i32", "p_counts": "*i32", "p_masks": "*i32", "capacity": "i32",
}  # fmt: skip


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_selection_compiles_without_spills(capability: int) -> None:
    sizes = {"CHUNK": 8192, "CHUNKS": 8, "K_PAD": 512, "DEPENDENT": capability >= 90}
    compiled = compile_for(select_kernel, SELECT_SIGNATURE, sizes, capability, num_warps=8)
    assert compiled.stack_bytes == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_plan_of_8_rows_compiles_without_spills(capability: int) -> None:
    sizes = {"ROWS": 8, "SEGMENT": 256, "LEVELS": 8, "COUNTED": 1024, "LISTED": 512}
    sizes |= {"DEPENDENT": capability >= 90}
    compiled = compile_for(plan_kernel, PLAN_SIGNATURE, sizes, capability, num_warps=8)
    assert compiled.stack_bytes == 0
