"""The float64 results that configurations are held against agree with the reference, and find errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from page4.experiments.autotune.exact import exact_rows
from page4.experiments.autotune.problem import Bench
from page4.experiments.autotune.problems import PROBLEMS
from page4.experiments.kernel_cases import attention_copies
from page4.kernels.block_plan import PackedPlan
from page4.kernels.codecs import BYTE_FLOATS
from page4.kernels.page4_attention_triton import AttentionConfig
from tests.experiments.autotune.cpu_machine import CPU, NEEDS_CPU, cpu_machine, small_cell, small_step
from tests.kernels.attention_cases import FORMATS, make_case

CONFIG = AttentionConfig(splits=2, tile_tokens=16, num_warps=4, num_stages=1)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("gate", [False, True])
def test_exact_rows_are_those_of_an_independent_float64_attention(kv_format: str, gate: bool) -> None:
    scales = {"k_scale": 0.5, "v_scale": 2.0} if kv_format in BYTE_FLOATS else {}
    case = make_case(length=77, requests=2, kv_format=kv_format, gate=gate, **scales)
    exact = exact_rows(case.inputs)
    assert exact.rows.tolist() == list(range(8))
    torch.testing.assert_close(exact.out, case.expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(exact.lse, case.expected_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exact.magnitude, case.magnitude, rtol=1e-6, atol=1e-9)


def test_many_groups_are_sampled_over_their_whole_range() -> None:
    inputs = attention_copies(small_step(requests=150, rows=1, context=9), CPU)[0]
    rows = exact_rows(inputs).rows
    assert rows.tolist() == list(range(0, 150, 3))


def test_padding_groups_have_no_rows() -> None:
    case = make_case(requests=2)
    plan = dataclasses.replace(case.inputs.plan, group_rows=torch.tensor([4, 0], dtype=torch.int32))
    plan = PackedPlan(**{name: values.to(case.inputs.q.device) for name, values in vars(plan).items()})
    assert exact_rows(dataclasses.replace(case.inputs, plan=plan)).rows.tolist() == [0, 1, 2, 3]


@NEEDS_CPU
@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "int8"])
def test_a_right_kernel_is_found_right(kv_format: str) -> None:
    cell = small_cell(kv_format=kv_format)
    assert Bench(cell, cpu_machine(copies=1), seed=0).difference(CONFIG) is None


@NEEDS_CPU
def test_an_error_in_one_element_and_rows_that_are_not_written_are_found() -> None:
    inputs = attention_copies(small_step(), CPU)[0]
    exact = exact_rows(inputs)
    out, lse = PROBLEMS["page4_attention_triton"].run(inputs, CONFIG)
    assert exact.difference(out, lse) is None
    damaged = out.clone()
    damaged[3, 2, 5] += 4e-2
    assert "the output is off by" in (exact.difference(damaged, lse) or "")
    damaged = out.clone()
    damaged[5] = torch.nan
    assert exact.difference(damaged, lse) == "the output is off by inf times the allowed error"
    wrong_lse = lse.clone()
    wrong_lse[1, 1] += 1e-2
    assert exact.difference(out, wrong_lse) == "the LSE differs"
