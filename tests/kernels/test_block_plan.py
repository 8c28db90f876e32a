"""Packed plans: row groups, mask words, and agreement with the reference plan they are made from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from page4.kernels.block_plan import RowGroups, pack_plan, plan_capacity
from page4.kernels.block_select import union_plan
from page4.kernels.errors import InputError


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**16),
    requests=st.integers(1, 3),
    per_request=st.integers(0, 11),
    rows_per_group=st.integers(1, 8),
    spare=st.integers(0, 3),
)
def test_a_packed_plan_says_what_the_reference_plan_says(
    seed: int, requests: int, per_request: int, rows_per_group: int, spare: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = requests * per_request
    selected = torch.rand(rows, 9, generator=generator) < 0.5
    positions = torch.randint(-1, 40, (rows,), generator=generator)
    plan = union_plan(selected, positions, rows_per_group, requests=requests)
    packed = pack_plan(plan, rows, requests, capacity=plan.blocks.shape[1] + spare)

    assert packed.counts.tolist() == plan.counts.tolist()
    assert packed.blocks.dtype == packed.masks.dtype == packed.counts.dtype == torch.int32
    for group, count in enumerate(plan.counts.tolist()):
        assert packed.blocks[group, :count].tolist() == plan.blocks[group, :count].tolist()
        for entry in range(count):
            word = packed.masks[group, entry].item() & 0xFFFFFFFF
            for m in range(rows_per_group):
                seen = [bool(word >> (4 * m + t) & 1) for t in range(4)]
                assert seen == plan.token_mask[group, entry, m].tolist()
        assert (packed.blocks[group, count:] == -1).all() and (packed.masks[group, count:] == 0).all()
        request, start = int(packed.group_request[group]), int(packed.group_start[group])
        assert request * per_request <= start
        assert start + int(packed.group_rows[group]) <= (request + 1) * per_request
    assert int(packed.group_rows.sum()) == rows


def test_the_eighth_row_uses_the_sign_bit() -> None:
    selected = torch.zeros(8, 1, dtype=torch.bool)
    selected[7] = True
    packed = pack_plan(union_plan(selected, torch.full((8,), 3), 8), rows=8)
    assert packed.masks.tolist() == [[-(2**28)]]  # 0xF0000000


def test_rows_are_grouped_in_order_and_never_across_requests() -> None:
    groups = RowGroups.of([5, 0, 1, 4], rows_per_group=4, requests=[7, 3, 0, 2], groups=6)
    assert groups.request.tolist() == [7, 7, 0, 2, -1, -1]
    assert groups.start.tolist() == [0, 4, 5, 6, 0, 0]
    assert groups.rows.tolist() == [4, 1, 1, 4, 0, 0]
    assert groups.rows.dtype == torch.int32


def test_no_rows_form_no_groups() -> None:
    assert RowGroups.of([], 4).request.shape == (0,)
    assert RowGroups.of([0, 0], 4).rows.shape == (0,)


def test_wrong_groups_are_refused() -> None:
    with pytest.raises(InputError, match=r"1\.\.8"):
        RowGroups.of([4], 9)
    with pytest.raises(InputError, match="2 requests"):
        RowGroups.of([4], 4, requests=[0, 1])
    with pytest.raises(InputError, match="more than"):
        RowGroups.of([4, 4], 4, groups=1)


def test_capacity_is_bounded_by_rows_and_by_blocks() -> None:
    assert plan_capacity(4, 512, 65536) == 4 * 513
    assert plan_capacity(8, 512, 100) == 100


def test_plans_that_do_not_fit_are_refused() -> None:
    selected, positions = torch.ones(9, 2, dtype=torch.bool), torch.arange(9)
    with pytest.raises(InputError, match="4 tokens"):
        pack_plan(union_plan(selected, positions, 4, ratio=2), 9)
    with pytest.raises(InputError, match=r"1\.\.8"):
        pack_plan(union_plan(selected, positions, 9), 9)
    with pytest.raises(InputError, match="groups"):
        pack_plan(union_plan(selected, positions, 4), 4)
    with pytest.raises(InputError, match="do not divide"):
        pack_plan(union_plan(selected, positions, 4), 9, requests=2)
    with pytest.raises(InputError, match="capacity"):
        pack_plan(union_plan(selected, positions, 4), 9, capacity=1)
