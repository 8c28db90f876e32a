"""Grouped attention in Triton: equal to the reference and to float64, whatever lies in unused memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from page4.experiments.sm70.compiling import CAPABILITIES, compile_for
from page4.kernels import page4_attention_merge_triton
from page4.kernels.block_plan import PackedPlan, pack_plan
from page4.kernels.block_select import BlockPlan, select_blocks, union_plan
from page4.kernels.errors import InputError
from page4.kernels.page4_attention import page4_attention_reference
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import Partials, merge_kernel, merge_partials
from page4.kernels.page4_attention_triton import (
    AttentionConfig,
    default_config,
    padded_members,
    page4_attention_kernel,
    page4_attention_triton,
)
from tests.kernels.attention_cases import DEVICE, FORMATS, STALE, Case, assert_near, make_case


def run(case: Case, splits: int = 1, tile_tokens: int = 16, **changes: Any) -> tuple[Tensor, Tensor]:
    config = AttentionConfig(splits=splits, tile_tokens=tile_tokens, num_warps=4, num_stages=2)
    return page4_attention_triton(replace(case.inputs, **changes), config)


def check(case: Case, splits: int = 1, tile_tokens: int = 16) -> None:
    case.check(*run(case, splits, tile_tokens))


def reference(inputs: AttentionInputs, plan: BlockPlan) -> tuple[Tensor, Tensor]:
    return page4_attention_reference(
        inputs.q.contiguous(), inputs.k_pages, inputs.v_pages, inputs.block_tables, plan, inputs.kv_format,
        inputs.k_scale, inputs.v_scale, inputs.softmax_scale,
    )  # fmt: skip


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3"])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group", "rows"), [(1, 6, 4), (2, 12, 2), (1, 16, 8), (3, 1, 1)])
def test_heads_and_dimensions(kv_heads: int, group: int, rows: int, dim: int, kv_format: str) -> None:
    case = make_case(
        kv_heads=kv_heads,
        group=group,
        rows=rows,
        rows_per_group=rows,
        dim=dim,
        kv_format=kv_format,
        length=40,
    )
    check(case)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_formats(kv_format: str) -> None:
    check(make_case(kv_format=kv_format, dim=64, gate=True), splits=2)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_fp32_queries_are_attended_in_fp32(kv_format: str) -> None:
    check(make_case(kv_format=kv_format, dtype=torch.float32, gate=True), splits=2)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 257])
def test_lengths(length: int) -> None:
    check(make_case(length=length, topk=64, kv_format="e4m3", kv_heads=1), splits=3)


@given(
    length=st.integers(1, 90),
    rows=st.integers(1, 9),
    rows_per_group=st.integers(1, 8),
    requests=st.integers(1, 2),
    group=st.sampled_from([1, 3, 6, 16]),
    topk=st.integers(1, 12),
    kv_format=st.sampled_from(FORMATS),
    splits=st.sampled_from([1, 2, 3, 8]),
    tile_tokens=st.sampled_from([16, 32, 64]),
    gate=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=20)
def test_any_plan(
    length: int, rows: int, rows_per_group: int, requests: int, group: int, topk: int, kv_format: str,
    splits: int, tile_tokens: int, gate: bool, seed: int,
) -> None:  # fmt: skip
    case = make_case(
        length=length, rows=rows, rows_per_group=rows_per_group, requests=requests, group=group, topk=topk,
        kv_format=kv_format, kv_heads=1, gate=gate, seed=seed,
    )  # fmt: skip
    check(case, splits, tile_tokens)


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "e4m3"])
def test_equals_the_reference(kv_format: str) -> None:
    case = make_case(length=103, rows=5, requests=2, kv_format=kv_format, dtype=torch.float32)
    positions = torch.arange(98, 103).repeat(2)
    selected = select_blocks(torch.rand(10, 25), (positions + 1) // 4, 6)
    plan = union_plan(selected.to(DEVICE), positions.to(DEVICE), 4, requests=2)
    inputs = replace(case.inputs, plan=pack_plan(plan, 10, 2))
    out, lse = run(replace(case, inputs=inputs), splits=2)
    expected_out, expected_lse = reference(inputs, plan)
    torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**9])
def test_scales_reach_the_output_once(scale: float) -> None:
    check(make_case(kv_format="e4m3", k_scale=scale, v_scale=scale))
    check(make_case(kv_format="int8", k_scale=scale, v_scale=scale), splits=2)


def test_the_workspace_may_hold_anything() -> None:
    """64 splits of a few tokens: most are empty, and parts that were never written hold NaN."""
    case = make_case(gate=True, requests=2)
    expected, expected_lse = run(case)
    partials = Partials.empty(case.inputs, 64)
    partials.out.fill_(torch.nan)
    partials.lse.fill_(torch.nan)
    out, lse = (torch.full_like(x, torch.nan) for x in (expected, expected_lse))
    config = AttentionConfig(splits=64, tile_tokens=16, num_warps=4, num_stages=2)
    given_out, given_lse = page4_attention_triton(case.inputs, config, partials, out, lse)
    assert given_out is out and given_lse is lse
    assert_near(out, case.expected, case.magnitude)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_without_tokens_give_zero_and_minus_infinity(splits: int) -> None:
    case = make_case(rows=4, gate=True)
    inputs = case.inputs
    masks = inputs.plan.masks & ~0xF0  # row 1 sees nothing
    assert inputs.gate is not None
    inputs.gate[1] = torch.nan
    plan = replace(inputs.plan, masks=masks)
    out, lse = run(case, splits, plan=plan)
    others = [0, 2, 3]
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    assert_near(out[others], case.expected[others], case.magnitude[others])
    out, lse = run(case, splits, plan=replace(plan, counts=torch.zeros_like(plan.counts)))
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("live", [[], [0], [2], [0, 1, 2]])
def test_merge_of_empty_and_live_splits(live: list[int]) -> None:
    inputs = make_case(rows=1, kv_heads=1, group=1, rows_per_group=1).inputs
    partials = Partials.empty(inputs, 3)
    partials.out.fill_(torch.nan)
    partials.lse.fill_(-torch.inf)
    values = torch.randn(3, 32, device=DEVICE)
    weights = torch.tensor([-300.0, 2.0, 500.0], device=DEVICE)
    for split in live:
        partials.out[0, split, 0, 0] = values[split]
        partials.lse[0, split, 0, 0] = weights[split]
    out, lse = inputs.outputs(None, None)
    merge_partials(partials, inputs, 2.0, out, lse)
    if not live:
        assert (out == 0).all() and (lse == -torch.inf).all()
        return
    chosen = weights[live].double() * math.log(2)
    expected = 2.0 * chosen.softmax(0) @ values[live].double()
    torch.testing.assert_close(out[0, 0].double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse[0, 0].double(), chosen.logsumexp(0), rtol=1e-6, atol=0.0)


def test_a_warp_merges_alone_as_on_a_v100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page4_attention_merge_triton, "_adds_in_one_warp", lambda device: True)
    for live in ([], [0], [2]):
        test_merge_of_empty_and_live_splits(live)
    for splits, dim in ((2, 256), (5, 128), (33, 64)):
        check(make_case(length=150, topk=30, dim=dim, kv_heads=1, group=5, gate=True), splits)


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("side", ["k", "v"])
def test_poison_of_one_side_does_not_leak(side: str, kv_format: str) -> None:
    """make_case poisons both; with one side cleaned the other alone is still harmless."""
    case = make_case(length=77, kv_format=kv_format)
    expected, _ = run(case, tile_tokens=64)
    pages = getattr(case.inputs, f"{side}_pages").clone()
    used = case.inputs.block_tables[0, :5]
    mask = torch.ones(len(pages), 16, dtype=torch.bool)
    mask[used[:4]] = False
    mask[used[4], :13] = False
    pages.transpose(1, 2)[mask] = 0
    assert torch.equal(run(case, tile_tokens=64, **{f"{side}_pages": pages})[0], expected)


def test_padding_groups_write_nothing() -> None:
    """A graph captured for three groups, replayed with two: the third has request -1 and undefined lists."""
    case = make_case(requests=2, gate=True)
    plan = case.inputs.plan
    captured = PackedPlan(
        blocks=torch.cat((plan.blocks, torch.full_like(plan.blocks[:1], STALE))),
        masks=torch.cat((plan.masks, torch.full_like(plan.masks[:1], -1))),
        counts=torch.cat((plan.counts, torch.full_like(plan.counts[:1], STALE))),
        group_request=torch.cat((plan.group_request, torch.full_like(plan.group_request[:1], -1))),
        group_start=torch.cat((plan.group_start, torch.zeros_like(plan.group_start[:1]))),
        group_rows=torch.cat((plan.group_rows, torch.zeros_like(plan.group_rows[:1]))),
    )
    padded = torch.cat((case.inputs.q, torch.full_like(case.inputs.q[:4], torch.nan)))
    gate = torch.cat((torch.zeros_like(case.inputs.q), torch.full_like(case.inputs.q[:4], torch.nan)))
    inputs = replace(case.inputs, q=padded, gate=gate, plan=captured)
    for splits in (1, 3):
        out, lse = torch.full_like(padded, 7.0), torch.full(padded.shape[:2], 7.0, device=DEVICE)
        config = AttentionConfig(splits=splits, tile_tokens=16, num_warps=4, num_stages=2)
        page4_attention_triton(inputs, config, out=out, lse=lse)
        assert (out[8:] == 7).all() and (lse[8:] == 7).all()
        expected = run(case, splits, gate=gate[:8])[0]
        assert torch.equal(out[:8], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_format": "fp7"}, "unknown KV format"),
        ({"kv_format": "e4m3"}, "must be torch.uint8"),
        ({"k_scale": 0.0}, "k_scale"),
        ({"v_scale": math.nan}, "v_scale"),
        ({"rows_per_group": 9}, "rows_per_group"),
        ({"v_pages": torch.zeros(1, 2, 16, 32).half()}, "v_pages"),
        ({"q": torch.zeros(4, 5, 32).half()}, "query heads"),
        ({"q": torch.zeros(4, 6, 48).half()}, "D one of"),
        ({"q": torch.zeros(4, 6, 32).double()}, "float16 or float32"),
        ({"gate": torch.zeros(4, 6, 32)}, "gate"),
        ({"block_tables": torch.zeros(1, 5).int()}, "block_tables"),
        ({"k_token_scales": torch.ones(8, 2, 16)}, "int8"),
    ],
)
def test_inputs_that_disagree_are_refused(change: dict[str, Any], message: str) -> None:
    inputs = make_case().inputs
    with pytest.raises(InputError, match=message):
        replace(inputs, **{k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in change.items()})


def test_outputs_and_partials_of_another_call_are_refused() -> None:
    inputs = make_case().inputs
    config = AttentionConfig(splits=2, tile_tokens=16, num_warps=4, num_stages=2)
    with pytest.raises(InputError, match="out must be"):
        page4_attention_triton(inputs, config, out=torch.empty(4, 6, 32, device=DEVICE))
    with pytest.raises(InputError, match="partials"):
        page4_attention_triton(inputs, config, partials=Partials.empty(inputs, 3))
    with pytest.raises(InputError, match="splits"):
        AttentionConfig(splits=65, tile_tokens=16, num_warps=4, num_stages=2)
    with pytest.raises(InputError, match="tile_tokens"):
        AttentionConfig(splits=1, tile_tokens=48, num_warps=4, num_stages=2)


def test_default_splits_fill_the_gpu() -> None:
    inputs = make_case(length=2000, topk=512, rows=4).inputs  # one group of two KV heads
    assert default_config(inputs, 132).splits > 4
    assert default_config(inputs, 1).splits == 1


SIGNATURE = {
    "p_q": "*fp16", "stride_q_row": "i32:16", "stride_q_head": "i32:16",
    "p_tables": "*i64", "stride_table": "i32", "p_blocks": "*i32", "p_masks": "*i32", "p_counts": "*i32",
    "p_group_request": "*i32", "p_group_start": "*i32", "p_group_rows": "*i32", "capacity": "i32",
    "p_gate": "*fp16", "stride_gate_row": "i32:16", "stride_gate_head": "i32:16",
    "p_out": "*fp32", "p_lse": "*fp32", "score_factor": "fp32", "v_factor": "fp32",
}  # fmt: skip


# Triton has no tensor-core products for sm_70: its code is long, so few cells are compiled.
@pytest.mark.parametrize(
    ("capability", "group", "dim", "kv_format"),
    [
        (70, 6, 64, "fp16"),
        (70, 6, 256, "e4m3"),
        *product((80, 90), (6, 12), (256,), ("fp16", "e4m3")),
        *product((80, 90), (6,), (64,), ("e4m3", "int8")),
    ],
)
def test_compiles_for_four_rows_without_spills(capability: int, group: int, dim: int, kv_format: str) -> None:
    case = make_case(kv_heads=1, group=group, dim=dim, kv_format=kv_format, length=16)
    config = default_config(case.inputs, 132, tensor_cores=capability >= 80)
    pages = "*fp16" if kv_format == "fp16" else "*i32"
    scales = ("p_k_token_scales", "p_v_token_scales")
    signature = SIGNATURE | {"p_k": pages, "p_v": pages}
    constants: dict[str, Any] = {
        "FORMAT": kv_format, "HQ": group, "HKV": 1, "D": dim, "ROWS": 4, "SPLITS": 4,
        "BM": padded_members(case.inputs), "BN": config.tile_tokens, "DEPENDENT": capability >= 90,
    }  # fmt: skip
    if kv_format == "int8":
        signature |= dict.fromkeys(scales, "*fp32")
    else:
        constants |= dict.fromkeys(scales)
    compiled = compile_for(
        page4_attention_kernel, signature, constants, capability,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    assert compiled.stack_bytes == 0
    assert ("mma" in compiled.ptx) == (capability >= 80)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_merge_compiles(capability: int) -> None:
    signature = {
        "p_part": "*fp32", "p_part_lse": "*fp32", "p_group_start": "*i32", "p_group_rows": "*i32",
        "p_gate": "*fp16", "stride_gate_row": "i32:16", "stride_gate_head": "i32:16",
        "p_out": "*fp16", "p_lse": "*fp32", "v_factor": "fp32", "splits": "i32",
    }  # fmt: skip
    constants = {
        "HQ": 24,
        "HKV": 2,
        "D": 256,
        "ROWS": 4,
        "BM": 1,
        "BS": 32,
        "BD": 128,
        "DEPENDENT": capability >= 90,
    }
    compiled = compile_for(merge_kernel, signature, constants, capability, num_warps=2)
    assert compiled.stack_bytes == 0
