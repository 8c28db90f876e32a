"""The float64 reference of the bench against that of the kernels, and what its comparison notices."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from page4.experiments.bench.baseline import GatherAttention
from page4.experiments.bench.peer import PeerAttention, load_peer, row_tokens
from page4.experiments.bench.reference import Check, attention_groups, sample_groups, worst
from page4.experiments.kernel_cases import StepShape, attention_inputs, selected_blocks
from page4.kernels.block_select import union_plan
from page4.kernels.page4_attention import page4_attention_reference
from page4.kernels.page4_attention_inputs import AttentionInputs

SHAPE = StepShape(2, 4, 6, 2, context=95, overlap=0.5, kv_format="e4m3", head_dim=32, index_dim=16, topk=8)
PROMPT = dataclasses.replace(SHAPE, requests=1, rows=40, context=40)


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "e3m4"])
@pytest.mark.parametrize("shape", [SHAPE, PROMPT], ids=["decode", "prefill"])
def test_groups_agree_with_the_reference_of_the_kernels(shape: StepShape, kv_format: str) -> None:
    shape = dataclasses.replace(shape, kv_format=kv_format)
    inputs = dataclasses.replace(attention_inputs(shape, "cpu", seed=5), gate=None)
    chosen = selected_blocks(shape, torch.Generator().manual_seed(5))
    positions = torch.arange(shape.context - shape.rows, shape.context).repeat(shape.requests)
    plan = union_plan(chosen, positions, shape.rows_per_group, requests=shape.requests)
    out, lse = page4_attention_reference(
        inputs.q.double(), inputs.k_pages, inputs.v_pages, inputs.block_tables, plan, kv_format,
        inputs.k_scale, inputs.v_scale, inputs.softmax_scale,
    )  # fmt: skip
    for group in attention_groups(inputs, range(inputs.groups)):
        torch.testing.assert_close(group.out, out[group.rows], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(group.lse, lse[group.rows], rtol=1e-10, atol=1e-10)
        assert (group.magnitude >= group.out.abs() - 1e-12).all()


def test_int8_tokens_are_scaled_and_the_gate_applied() -> None:
    inputs = attention_inputs(dataclasses.replace(SHAPE, kv_format="int8"), "cpu")
    assert inputs.v_token_scales is not None and inputs.gate is not None
    (once,) = attention_groups(inputs, [1])
    doubled = dataclasses.replace(inputs, v_token_scales=2 * inputs.v_token_scales, gate=None)
    (twice,) = attention_groups(doubled, [1])
    expected = 0.5 * twice.out * inputs.gate[once.rows].double().sigmoid()
    torch.testing.assert_close(once.out, expected)


def test_a_rounded_result_passes_and_a_slightly_wrong_one_does_not() -> None:
    inputs = attention_inputs(SHAPE, "cpu")
    groups = attention_groups(inputs, range(inputs.groups))
    exact = torch.cat([group.out for group in groups])
    lse = torch.cat([group.lse for group in groups])

    def error(out: torch.Tensor, lse: torch.Tensor) -> float:
        return max(group.error(out, lse, 3 * 2.0**-11) for group in groups)

    assert error(exact.half(), lse.float()) <= 1
    assert error(exact * 1.02, lse) > 1
    assert error(exact, lse + 1e-3) > 1
    moved = exact.clone()
    moved[3, 2, 7] += 0.05
    assert error(moved, lse) > 1
    moved[3, 2, 7] = torch.nan
    assert error(moved, lse) == float("inf")


def test_nothing_but_numbers_within_their_bounds_pass() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert worst(one + 0.5, one, one) == pytest.approx(0.5)
    assert not Check(worst(torch.tensor([1.0, torch.inf, 1.0]), one, one), 1, 1).passed
    assert not Check(worst(torch.tensor([1.0, torch.nan, 1.0]), one, one), 1, 1).passed
    assert not Check(worst(one + 1e-3, one, 0 * one), 1, 1).passed


def test_samples_are_ascending_without_repetition() -> None:
    some = sample_groups(1000, 8, seed=1)
    assert some == sorted(set(some)) and len(some) == 8 and some[-1] < 1000
    assert some == sample_groups(1000, 8, seed=1) != sample_groups(1000, 8, seed=2)
    assert sample_groups(5, 0, seed=1) == sample_groups(5, 9, seed=1) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8"])
@pytest.mark.parametrize("slab", [2**31, 1], ids=["at once", "group by group"])
def test_gather_and_sdpa_compute_the_same_attention(kv_format: str, slab: int) -> None:
    inputs = attention_inputs(dataclasses.replace(SHAPE, kv_format=kv_format), "cpu")
    baseline = GatherAttention(inputs)
    baseline.groups_at_once = min(baseline.groups_at_once, slab)
    out = baseline()
    assert out.dtype == inputs.q.dtype
    half = out.dtype == torch.float16
    for group in attention_groups(inputs, range(inputs.groups)):
        assert group.error(out, None, 5 * 2.0**-11 * half, 2.0**-11 * half) <= 1


def visible_by_hand(inputs: AttentionInputs, row: int) -> list[int]:
    plan, seen = inputs.plan, []
    for group in range(inputs.groups):
        member = row - int(plan.group_start[group])
        if 0 <= member < int(plan.group_rows[group]):
            for entry in range(int(plan.counts[group])):
                bits = (int(plan.masks[group, entry]) >> (4 * member)) & 0xF
                seen += [4 * int(plan.blocks[group, entry]) + t for t in range(4) if bits >> t & 1]
    return seen


@pytest.mark.parametrize("shape", [SHAPE, PROMPT], ids=["decode", "prefill"])
def test_token_lists_are_what_each_row_sees(shape: StepShape) -> None:
    inputs = attention_inputs(shape, "cpu")
    width = 4 * shape.topk + 3
    tokens, request = row_tokens(inputs, width)
    for row in range(shape.total_rows):
        expected = visible_by_hand(inputs, row)
        assert tokens[row, :width].tolist() == expected + [-1] * (width - len(expected))
        assert int(tokens[row, width]) == len(expected)
        assert int(request[row]) == row // shape.rows


def listed_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    use_prefill_config: bool,
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
    *,
    output_gate: torch.Tensor,
) -> torch.Tensor:
    """The contract of the peer's launcher in plain PyTorch, a row at a time."""
    heads_per_kv = q.shape[1] // k_cache.shape[2]
    for row in range(len(q)):
        token = logical_indices[row, : int(logical_indices[row, -1])].long()
        page = block_table[int(token_to_req[row]), token // k_cache.shape[1]].long()
        k, v = (
            cache[page, token % cache.shape[1]].double().repeat_interleave(heads_per_kv, dim=1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("hd,lhd->hl", q[row].double(), k) * k_scale * q.shape[2] ** -0.5
        gate = output_gate[row].double().sigmoid()
        out[row] = gate * v_scale * torch.einsum("hl,lhd->hd", scores.softmax(dim=1), v)
    return out


@pytest.mark.parametrize("shape", [SHAPE, PROMPT], ids=["decode", "prefill"])
def test_the_peer_gets_the_same_inputs(shape: StepShape) -> None:
    inputs = attention_inputs(shape, "cpu")
    call = PeerAttention(inputs, listed_attention, shape.topk)
    out = call()
    for group in attention_groups(inputs, range(inputs.groups), call.q, call.gate):
        assert group.error(out, None, 4 * 2.0**-8) <= 1


def test_a_peer_that_is_not_installed_says_so() -> None:
    launcher = load_peer()
    assert callable(launcher) or "cannot be imported" in launcher
