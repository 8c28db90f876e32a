"""Inputs for timing and tuning: the overlap, plans and bytes that were asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from page4.experiments.kernel_cases import (
    StepShape,
    attention_copies,
    attention_inputs,
    packed_plan,
    prepare_copies,
    score_copies,
    select_copies,
    selected_blocks,
    unique_bytes,
)
from page4.kernels.block_plan import pack_plan
from page4.kernels.block_select import select_blocks, union_plan
from page4.kernels.codecs import decode_kv
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_inputs import AttentionInputs


def shape_of(**changes: Any) -> StepShape:
    values: dict[str, Any] = {
        "requests": 2, "rows": 4, "query_heads": 6, "kv_heads": 2, "context": 301, "overlap": 0.75,
        "kv_format": "e4m3", "head_dim": 32, "index_dim": 16, "topk": 16,
    }  # fmt: skip
    return StepShape(**values | changes)


def select(shape: StepShape, seed: int = 0) -> Tensor:
    """bool [requests, rows, blocks]."""
    chosen = selected_blocks(shape, torch.Generator().manual_seed(seed))
    return chosen.view(shape.requests, shape.rows, -1)


def positions_of(shape: StepShape) -> Tensor:
    return torch.arange(shape.context - shape.rows, shape.context).repeat(shape.requests)


def test_combinations_come_in_the_order_of_importance() -> None:
    """Later requests, heads and rows before the next format: an interrupted study has the first one whole."""
    same: dict[str, Any] = {"context": 301, "overlap": 0.75, "head_dim": 32, "topk": 16}
    steps = StepShape.combinations(("e4m3", "fp16"), (4, 1), ((6, 1), (24, 2)), (16, 64), **same)
    assert len(set(steps)) == 16
    assert [(s.kv_format, s.rows, s.query_heads, s.kv_heads, s.requests) for s in steps[:5]] == [
        ("e4m3", 4, 6, 1, 16),
        ("e4m3", 4, 6, 1, 64),
        ("e4m3", 4, 24, 2, 16),
        ("e4m3", 4, 24, 2, 64),
        ("e4m3", 1, 6, 1, 16),
    ]
    assert all({name: getattr(step, name) for name in same} == same for step in steps)
    with pytest.raises(InputError, match="unknown KV format 'fp7'"):
        StepShape.combinations(("e4m3", "fp7"), (4,), ((6, 1),), (1,), **same)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_rows_share_exactly_what_was_asked(overlap: float, rows: int) -> None:
    shape = shape_of(context=1000, rows=rows, overlap=overlap)
    for request in select(shape):
        shared = {int(block) for block in request.all(dim=0).nonzero()}
        assert len(shared) == overlap * shape.topk
        readers = request.sum(dim=0)
        assert ((readers == 0) | (readers == 1) | (readers == rows)).all()  # the rest belongs to one row


def test_requests_and_seeds_select_different_blocks() -> None:
    first, second = select(shape_of())
    assert not torch.equal(first, second)
    assert not torch.equal(select(shape_of(), seed=1)[0], first)
    assert torch.equal(select(shape_of())[0], first)


SHAPES = st.builds(
    shape_of,
    requests=st.integers(1, 3),
    rows=st.integers(1, 40),
    context=st.integers(40, 200),
    overlap=st.floats(0, 1),
    topk=st.integers(1, 24),
)


@settings(max_examples=40)
@given(SHAPES)
def test_every_row_selects_as_many_visible_blocks_as_selection_would(shape: StepShape) -> None:
    chosen = select(shape).flatten(0, 1)
    visible = (positions_of(shape) + 1) // 4
    assert torch.equal(chosen.sum(dim=1), visible.clamp(max=shape.topk))
    assert not chosen[torch.arange(shape.max_blocks) >= visible[:, None]].any()


@settings(max_examples=40)
@given(SHAPES)
def test_plans_are_those_of_the_reference(shape: StepShape) -> None:
    chosen = select(shape).flatten(0, 1)
    plan = packed_plan(shape, chosen)
    union = union_plan(chosen, positions_of(shape), shape.rows_per_group, requests=shape.requests)
    expected = pack_plan(union, shape.total_rows, shape.requests, capacity=plan.blocks.shape[1])
    for name, values in vars(expected).items():
        assert torch.equal(getattr(plan, name), values), name


@settings(max_examples=20)
@given(SHAPES)
def test_scores_select_the_same_blocks(shape: StepShape) -> None:
    (inputs,) = select_copies(shape, "cpu", seed=3)
    visible = (inputs.positions + 1) // 4
    invisible = torch.arange(shape.max_blocks) >= visible[:, None]
    assert inputs.scores[invisible].isnan().all() and not inputs.scores[~invisible].isnan().any()
    chosen = select_blocks(inputs.scores.nan_to_num(0.0), visible, shape.topk)
    assert torch.equal(chosen, select(shape, seed=3).flatten(0, 1))


def bytes_by_hand(inputs: AttentionInputs) -> int:
    """Tokens as a set of (request, token), everything else from the definition."""
    plan, tokens, entries = inputs.plan, set(), 0
    for group in range(inputs.groups):
        for entry in range(int(plan.counts[group])):
            entries += 1
            block, mask = int(plan.blocks[group, entry]), int(plan.masks[group, entry]) % 2**32
            for bit in range(32):
                if mask >> bit & 1:
                    tokens.add((int(plan.group_request[group]), 4 * block + bit % 4))
    width = inputs.k_pages.element_size()
    per_head = 2 * inputs.head_dim * width + (2 * 4 if inputs.kv_format == "int8" else 0)
    rows = 3 * inputs.q.numel() * 2  # q, gate and out in FP16
    return len(tokens) * inputs.kv_heads * per_head + rows + 2 * 4 * entries


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_format": "fp16"},
        {"kv_format": "int8", "overlap": 0.0},
        {"rows": 37, "context": 77, "topk": 6},
    ],
    ids=["decode", "fp16", "int8", "prefill"],
)
def test_unique_bytes_are_those_of_a_set(changes: dict[str, Any]) -> None:
    inputs = attention_inputs(shape_of(**changes), "cpu")
    assert unique_bytes(inputs) == bytes_by_hand(inputs)


def test_groups_of_a_prefill_count_shared_tokens_once() -> None:
    inputs = attention_inputs(shape_of(requests=1, rows=64, context=64, topk=512), "cpu")
    keys = 64 * 2 * (2 * 32)  # every token of the prompt once: two heads, K and V in bytes
    rest = 3 * 2 * inputs.q.numel() + 8 * int(inputs.plan.counts.sum())
    assert unique_bytes(inputs) == keys + rest


def test_copies_share_no_page_and_leave_none_out() -> None:
    copies = attention_copies(shape_of(), "cpu", copies=3)
    pages = torch.cat([inputs.block_tables.flatten() for inputs in copies])
    assert torch.equal(pages.sort().values, torch.arange(len(copies[0].k_pages)))
    assert not torch.equal(pages, pages.sort().values)
    assert torch.equal(copies[0].plan.blocks, copies[2].plan.blocks)
    assert copies[0].plan.blocks.data_ptr() != copies[2].plan.blocks.data_ptr()
    assert not torch.equal(copies[0].q, copies[1].q)


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8"])
def test_pages_hold_numbers_of_the_size_of_keys(kv_format: str) -> None:
    inputs = attention_inputs(shape_of(kv_format=kv_format), "cpu")
    values = decode_kv(inputs.k_pages, kv_format) * inputs.k_scale
    if inputs.k_token_scales is not None:
        values = values * inputs.k_token_scales[..., None]
    assert values.isfinite().all()
    assert 0.4 < float(values.std()) < 1.6
    assert len(inputs.k_pages.flatten(1).unique(dim=0)) == len(inputs.k_pages)  # no page equals another


def test_score_and_prepare_copies_have_tables_of_their_own() -> None:
    scored = [inputs.block_tables for inputs in score_copies(shape_of(), "cpu", copies=2)]
    prepared = [inputs.rows.block_tables for inputs in prepare_copies(shape_of(), "cpu", copies=2)]
    for first, second in (scored, prepared):
        assert not set(first.flatten().tolist()) & set(second.flatten().tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"rows": 302}, "302 rows do not fit into a context of 301 tokens"),
        ({"overlap": 1.5}, "overlap must lie in 0..1, got 1.5"),
        ({"kv_format": "fp12"}, "unknown KV format 'fp12'"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shape_of(**changes)
