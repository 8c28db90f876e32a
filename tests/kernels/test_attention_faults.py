"""Faults that attention kernels elsewhere were found with, absent from plain Triton and from Gluon alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from page4.kernels.block_plan import PackedPlan
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_gluon import (
    GluonConfig,
    default_gluon_config,
    default_volta_config,
    page4_attention_gluon,
)
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import Partials
from page4.kernels.page4_attention_triton import default_config, page4_attention_triton
from tests.kernels.attention_cases import DEVICE, STALE, Case, assert_near, make_case
from tests.kernels.test_page4_attention_gluon import HAS_GPU, HAS_HOPPER, HERE
from tests.kernels.test_page4_attention_gluon import run as run_gluon

Attention = Callable[..., tuple[Tensor, Tensor]]


def triton(case: Case, splits: int = 2, tile_tokens: int = 64) -> tuple[Tensor, Tensor]:
    config = replace(default_config(case.inputs, 132), splits=splits, tile_tokens=tile_tokens)
    return page4_attention_triton(case.inputs, config)


def mma(case: Case, splits: int = 2, tile_tokens: int = 64) -> tuple[Tensor, Tensor]:
    config = default_gluon_config(case.inputs, 132)
    config = replace(config, splits=splits, tile_tokens=tile_tokens, instruction="mma")
    return run_gluon(case, config)


def wgmma(case: Case, splits: int = 2, tile_tokens: int = 64) -> tuple[Tensor, Tensor]:
    return run_gluon(case, GluonConfig(splits, tile_tokens, num_warps=4, instruction="wgmma"))


def mma884(case: Case, splits: int = 2, tile_tokens: int = 64) -> tuple[Tensor, Tensor]:
    """With the tiles of 8 tokens a warp that it has."""
    return run_gluon(case, replace(default_volta_config(case.inputs, 80), splits=splits))


def kernels(*dims: int) -> pytest.MarkDecorator:
    """Each kernel with heads of these sizes, or the next that it takes. Without a GPU not ``wgmma``."""
    needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a GPU of compute capability 9.0")
    skip = {
        attend: pytest.mark.skipif(attend.__name__ not in (*HERE, "triton"), reason="the GPU has another one")
        for attend in (triton, mma, mma884)
    }
    pairs = [
        pytest.param(attend, d, id=f"{attend.__name__}-{d}", marks=skip[attend])
        for d in dims
        for attend in skip
    ]
    for d in sorted({max(128, d) for d in dims}):
        pairs.append(pytest.param(wgmma, d, id=f"wgmma-{d}", marks=needs_hopper))
    return pytest.mark.parametrize(("attend", "dim"), pairs)


def changed(case: Case, **changes: Any) -> Case:
    return replace(case, inputs=replace(case.inputs, **changes))


def with_page_zero_poisoned(case: Case) -> Case:
    """All pages one further, so that page 0 is nobody's, and NaN."""
    inputs = case.inputs
    poison = torch.full_like(inputs.k_pages[:1], 0xFF)
    return changed(
        case,
        k_pages=torch.cat((poison, inputs.k_pages)),
        v_pages=torch.cat((poison, inputs.v_pages)),
        block_tables=inputs.block_tables + 1,
    )


@kernels(64, 256)
def test_list_entries_beyond_the_count_do_not_bring_nan_from_page_zero(attend: Attention, dim: int) -> None:
    """A probability of 0 times NaN is NaN. Twenty blocks fill a tile of 16 and a quarter of the next one."""
    case = with_page_zero_poisoned(make_case(length=77, topk=20, dim=dim, kv_format="e4m3"))
    plan = case.inputs.plan
    assert plan.counts.tolist() == [20]
    blocks = torch.nn.functional.pad(plan.blocks, (0, 40), value=0)
    masks = torch.nn.functional.pad(plan.masks, (0, 40), value=-1)
    out, lse = attend(changed(case, plan=replace(plan, blocks=blocks, masks=masks)))
    case.check(out, lse)


@kernels(64)
@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "e5m2"])
@pytest.mark.parametrize("poisoned", ["k", "v", "both"])
def test_nan_after_the_last_token_does_not_leak(
    poisoned: str, kv_format: str, attend: Attention, dim: int
) -> None:
    """Of the last page, 13 of 16 slots are in use. make_case poisons all others; one side may be cleaned."""
    case = make_case(length=77, dim=dim, kv_format=kv_format, topk=40)
    clean = {"k": ["v_pages"], "v": ["k_pages"], "both": []}[poisoned]
    poison = 0xFF if kv_format != "fp16" else torch.nan
    last = case.inputs.block_tables[0, 4]
    for name in ("k_pages", "v_pages"):
        unused = getattr(case.inputs, name)[last, :, 13:]
        assert unused.eq(poison).all() or unused.isnan().all()
        if name in clean:
            unused.zero_()
    case.check(*attend(case))


@kernels(256)
def test_products_and_sums_beyond_fp16_stay_finite(attend: Attention, dim: int) -> None:
    """K of the largest code and q of one give 114,688 at D = 256; FP16 ends at 65,504."""
    case = make_case(dim=dim, kv_format="e4m3", length=32)
    largest = torch.full_like(case.inputs.k_pages, 0x7E)
    loud = changed(case, k_pages=largest, q=torch.ones_like(case.inputs.q), softmax_scale=1.0)
    out, lse = attend(loud)
    assert out.isfinite().all()
    assert ((lse > 114_688) & (lse < 114_688 + math.log(32) + 0.01)).all()
    case = make_case(dim=dim, kv_format="fp16", length=64)
    out, _ = attend(changed(case, v_pages=torch.full_like(case.inputs.v_pages, 60_000.0)))
    torch.testing.assert_close(out, torch.full_like(out, 60_000.0), rtol=1e-3, atol=0.0)


@kernels(64)
def test_rounded_probabilities_cost_less_than_the_rounded_output(attend: Attention, dim: int) -> None:
    """Probabilities are rounded to FP16 before they meet V, everything after that is FP32.

    Unrounded ones (FP32 queries, plain Triton) leave an error 100 times smaller than an FP16 output has.
    """
    case = make_case(length=500, topk=120, rows=4, kv_heads=1, dim=dim)

    def error(out: Tensor) -> float:
        return (out.double() - case.expected).norm().item()

    rounded_output = error(case.expected.half())
    assert rounded_output < error(attend(case)[0]) < 2 * rounded_output
    assert error(triton(changed(case, q=case.inputs.q.float()))[0]) < 0.01 * rounded_output


@kernels(64, 128, 256)
@pytest.mark.parametrize("splits", [1, 2, 3, 64])
def test_any_number_of_splits_applies_the_scale_of_v_once(splits: int, dim: int, attend: Attention) -> None:
    """Most of 64 splits are empty; strides of the partial results depend on both parameters."""
    case = make_case(
        dim=dim, kv_format="e4m3", k_scale=0.3, v_scale=37.5, kv_heads=2, length=200, topk=20, gate=True
    )
    case.check(*attend(case, splits=splits))


@kernels(256)
def test_pages_beyond_two_gibibytes(attend: Attention, dim: int) -> None:
    """The last page of a cache whose offsets exceed 31 bits; memory that is never touched costs nothing."""
    case = make_case(kv_heads=4, group=1, dim=dim, kv_format="e4m3", length=20, rows=1, rows_per_group=1)
    inputs = case.inputs
    far = 2**31 // inputs.k_pages[0].numel() + 1
    moved = {}
    for name in ("k_pages", "v_pages"):
        near = getattr(inputs, name)
        moved[name] = torch.empty(far + len(near), *near.shape[1:], dtype=torch.uint8, device=DEVICE)
        moved[name][far:] = near
    tables = torch.where(inputs.block_tables < STALE, inputs.block_tables + far, STALE)
    case.check(*attend(changed(case, **moved, block_tables=tables)))


@kernels(64)
def test_table_entries_that_no_block_needs_are_never_followed(attend: Attention, dim: int) -> None:
    case = make_case(length=400, topk=3, rows=2, rows_per_group=2, dim=dim)
    plan = case.inputs.plan
    read = set((plan.blocks[0, : plan.counts[0]] // 4).tolist())
    tables = case.inputs.block_tables.clone()
    tables[0, [page for page in range(tables.shape[1]) if page not in read]] = -STALE
    case.check(*attend(changed(case, block_tables=tables)))


@kernels(64)
@pytest.mark.parametrize("tile_tokens", [64, 128])
def test_a_tile_spans_pages_in_any_order(tile_tokens: int, attend: Attention, dim: int) -> None:
    """Tiles of four and eight pages; where the pages lie does not change a bit."""
    case = make_case(length=200, dim=dim, topk=50, kv_format="e4m3")
    inputs = case.inputs
    expected = attend(case, tile_tokens=tile_tokens)
    case.check(*expected)
    order = torch.randperm(len(inputs.k_pages)).to(DEVICE)
    tables = order.argsort()[inputs.block_tables.clamp(max=len(order) - 1)]
    moved = changed(
        case,
        k_pages=inputs.k_pages[order],
        v_pages=inputs.v_pages[order],
        block_tables=torch.where(inputs.block_tables < STALE, tables, STALE),
    )
    for a, b in zip(attend(moved, tile_tokens=tile_tokens), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("page_tokens", [4, 784, 800, 1664])
def test_pages_of_other_sizes_are_refused(page_tokens: int) -> None:
    inputs = make_case().inputs
    pages = torch.zeros(3, 2, page_tokens, 32, dtype=torch.float16, device=DEVICE)
    with pytest.raises(InputError, match="16, 32"):
        replace(inputs, k_pages=pages, v_pages=pages)


@kernels(64)
def test_strides_of_rows_and_heads_do_not_change_a_bit(attend: Attention, dim: int) -> None:
    """make_case has q and gate interleaved, as a projection has; copies lie apart."""
    case = make_case(dim=dim, gate=True, requests=2)
    assert case.inputs.gate is not None and not case.inputs.q.is_contiguous()
    apart = changed(case, q=case.inputs.q.contiguous(), gate=case.inputs.gate.contiguous())
    for a, b in zip(attend(apart), attend(case), strict=True):
        assert torch.equal(a, b)


def together(cases: list[Case]) -> Case:
    """One call for the requests of several, which may have different numbers of rows."""
    every = [case.inputs for case in cases]
    columns = max(inputs.block_tables.shape[1] for inputs in every)
    width = max(inputs.plan.blocks.shape[1] for inputs in every)
    tables, plans = [], []
    page, row, request = 0, 0, 0
    for inputs in every:
        plan = inputs.plan
        beyond = columns - inputs.block_tables.shape[1]
        moved = torch.where(inputs.block_tables < STALE, inputs.block_tables + page, STALE)
        tables.append(torch.nn.functional.pad(moved, (0, beyond), value=STALE))
        free = width - plan.blocks.shape[1]
        plans.append(
            PackedPlan(
                torch.nn.functional.pad(plan.blocks, (0, free), value=STALE),
                plan.counts,
                torch.nn.functional.pad(plan.masks, (0, free), value=-1),
                plan.group_request + request,
                plan.group_start + row,
                plan.group_rows,
            )
        )
        page, row, request = page + len(inputs.k_pages), row + len(inputs.q), request + len(moved)

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(inputs, name) for inputs in every])

    fields = {name: torch.cat([getattr(plan, name) for plan in plans]) for name in vars(plans[0])}
    inputs = replace(
        every[0], q=joined("q"), k_pages=joined("k_pages"), v_pages=joined("v_pages"),
        block_tables=torch.cat(tables), plan=PackedPlan(**fields),
    )  # fmt: skip
    results = [
        torch.cat([getattr(case, n) for case in cases]) for n in ("expected", "expected_lse", "magnitude")
    ]
    return Case(inputs, *results)


def requests_of(*rows: int, dim: int = 64) -> list[Case]:
    return [
        make_case(length=70 + i, rows=n, rows_per_group=8, kv_heads=1, group=2, dim=dim, topk=9, seed=i)
        for i, n in enumerate(rows)
    ]


@kernels(64)
@pytest.mark.parametrize("rows", [(46, 3), (3, 46), (1, 4, 8, 13, 4)])
def test_a_prefill_tail_and_decode_rows_share_a_launch(
    rows: tuple[int, ...], attend: Attention, dim: int
) -> None:
    case = together(requests_of(*rows, dim=dim))
    assert len(case.inputs.q) == sum(rows)
    case.check(*attend(case))


@pytest.mark.parametrize("rows", range(1, 33))
def test_every_number_of_rows_up_to_64(rows: int) -> None:
    case = together(requests_of(rows, 65 - rows))
    case.check(*triton(case))


@kernels(64)
def test_the_order_of_requests_does_not_change_a_bit(attend: Attention, dim: int) -> None:
    cases = requests_of(5, 5, dim=dim)
    there, back = attend(together(cases)), attend(together(cases[::-1]))
    for a, b in zip(there, back, strict=True):
        assert torch.equal(a, torch.cat((b[5:], b[:5])))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_that_turned_bad_is_refused_at_the_launch(name: str, value: float) -> None:
    with pytest.raises(InputError, match=name):
        replace(make_case(kv_format="e4m3").inputs, **{name: value})


@pytest.mark.parametrize(
    "launch",
    [
        page4_attention_triton,
        pytest.param(
            page4_attention_gluon,
            marks=pytest.mark.skipif(not HAS_GPU, reason="needs a GPU of compute capability 8.0 or newer"),
        ),
    ],
)
@pytest.mark.parametrize("name", ["out", "lse"])
def test_a_workspace_of_another_dtype_is_refused(name: str, launch: Callable[..., object]) -> None:
    inputs: AttentionInputs = make_case(dim=64).inputs
    partials = Partials.empty(inputs, 2)
    assert partials.out.dtype == partials.lse.dtype == torch.float32
    wrong = replace(partials, **{name: getattr(partials, name).half()})
    default = default_gluon_config if launch is page4_attention_gluon else default_config
    config = replace(default(inputs, 132), splits=2)
    with pytest.raises(InputError, match=f"partials' {name} must be contiguous float32"):
        launch(inputs, config, wrong)


@kernels(64)
def test_rows_that_see_nothing_and_empty_splits_merge_without_nan(attend: Attention, dim: int) -> None:
    """Row 1 has no token in any split; at length 5 all splits but one are empty for every row."""
    case = make_case(length=5, rows=4, dim=dim, gate=True)
    plan = case.inputs.plan
    for splits in (1, 8):
        out, lse = attend(changed(case, plan=replace(plan, masks=plan.masks & ~0xF0)), splits=splits)
        assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
        others = [0, 2, 3]
        assert_near(out[others], case.expected[others], case.magnitude[others])
