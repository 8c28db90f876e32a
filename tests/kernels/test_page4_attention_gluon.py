"""Grouped attention in Gluon: on the GPU where there is one, else its PTX on the CPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from page4.kernels.codecs_triton import BITS_UNIT
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_gluon import (
    GluonConfig,
    decode_assembly,
    default_gluon_config,
    listed_turns,
    page4_attention_gluon,
    page4_attention_gluon_kernel,
)
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import Partials, merge_partials
from page4.kernels.page4_attention_triton import padded_members
from tests.kernels.attention_cases import DEVICE, STALE, Case, make_case
from tests.kernels.compile_targets import Compiled, compile_for
from tests.kernels.ptx_emulator import Pointer, run_grid

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def compiled(inputs: AttentionInputs, config: GluonConfig, native: bool, capability: int) -> Compiled:
    pages = "*fp16" if inputs.kv_format == "fp16" else "*i32"
    signature = {
        "p_q": "*fp16", "stride_q_row": "i32:16", "stride_q_head": "i32:16", "p_k": pages, "p_v": pages,
        "p_tables": "*i64", "stride_table": "i32", "p_blocks": "*i32", "p_masks": "*i32", "capacity": "i32",
        "p_counts": "*i32", "p_group_request": "*i32", "p_group_start": "*i32", "p_group_rows": "*i32",
        "stride_gate_row": "i32:16", "stride_gate_head": "i32:16",
        "p_out": "*fp16" if config.splits == 1 else "*fp32", "p_lse": "*fp32",
        "score_factor": "fp32", "v_factor": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "DECODE": decode_assembly(inputs.kv_format, native), "HQ": inputs.q.shape[1], "HKV": inputs.kv_heads,
        "D": inputs.head_dim, "ROWS": inputs.rows_per_group, "SPLITS": config.splits,
        "TURNS": listed_turns(inputs.plan.blocks.shape[1], config), "BM": padded_members(inputs),
        "BN": config.tile_tokens, "STAGES": config.num_stages, "WARPS": config.num_warps, "DEPENDENT": False,
    }  # fmt: skip
    if inputs.gate is None:
        constants["p_gate"] = None
    else:
        signature["p_gate"] = "*fp16"
    return compile_for(
        page4_attention_gluon_kernel, signature, constants, capability, num_warps=config.num_warps
    )


def pointer(tensor: Tensor) -> Pointer:
    """Into the storage of a tensor, which may be a view with any strides."""
    whole = tensor if tensor._base is None else tensor._base
    return Pointer(whole.numpy(), tensor.storage_offset() * tensor.element_size())


def emulate(case: Case, config: GluonConfig, native: bool) -> tuple[Tensor, Tensor]:
    """The launcher's steps with the emulator in the place of the GPU."""
    inputs, plan = case.inputs, case.inputs.plan
    config.check(inputs.head_dim)
    kernel = compiled(inputs, config, native, 90 if native else 80)
    unit = 1.0 if native else BITS_UNIT[inputs.kv_format]
    out, lse = inputs.outputs(None, None)
    partials = Partials.empty(inputs, config.splits)
    for tensor in (out, lse, partials.out, partials.lse):
        tensor.fill_(torch.nan)
    to = (out, lse) if config.splits == 1 else (partials.out, partials.lse)
    gate = [] if inputs.gate is None else [pointer(inputs.gate)]
    run_grid(
        kernel.ptx,
        [
            pointer(inputs.q), inputs.q.stride(0), inputs.q.stride(1),
            pointer(inputs.k_pages), pointer(inputs.v_pages),
            pointer(inputs.block_tables), inputs.block_tables.stride(0),
            pointer(plan.blocks), pointer(plan.masks), plan.blocks.shape[1],
            *map(pointer, (plan.counts, plan.group_request, plan.group_start, plan.group_rows)),
            *gate, *inputs.gate_strides, *map(pointer, to),
            inputs.softmax_scale * inputs.k_scale * unit * math.log2(math.e), inputs.v_scale * unit,
        ],
        (inputs.groups, inputs.kv_heads, config.splits),
        32 * config.num_warps,
        kernel.shared_bytes,
    )  # fmt: skip
    if config.splits > 1:
        merge_partials(partials, inputs, inputs.v_scale * unit, out, lse)
    return out, lse


def run(case: Case, config: GluonConfig, native: bool = False) -> tuple[Tensor, Tensor]:
    if HAS_GPU:  # which decides by itself whether it decodes natively
        return page4_attention_gluon(case.inputs, config)
    return emulate(case, config, native)


@pytest.mark.parametrize(
    ("kv_format", "native"),
    [("fp16", False), ("e4m3", False), ("e4m3", True), ("e5m2", False), ("e3m4", False)],
)
def test_formats(kv_format: str, native: bool) -> None:
    """Of two splits and with scales far from one, where a format has them."""
    scales = {} if kv_format == "fp16" else {"k_scale": 0.3, "v_scale": 37.5}
    case = make_case(kv_heads=1, group=6, dim=256, kv_format=kv_format, gate=True, topk=12, **scales)
    case.check(*run(case, GluonConfig(splits=2, tile_tokens=32, num_warps=4), native))


@pytest.mark.parametrize(
    ("kv_heads", "group", "rows", "dim", "config"),
    [
        (2, 12, 4, 256, GluonConfig(splits=1, tile_tokens=64, num_warps=8)),
        (1, 16, 8, 64, GluonConfig(splits=1, tile_tokens=32, num_warps=2)),
        (1, 5, 7, 128, GluonConfig(splits=3, tile_tokens=64, num_warps=4)),
        (3, 1, 1, 128, GluonConfig(splits=1, tile_tokens=128, num_warps=1)),
        (2, 3, 5, 32, GluonConfig(splits=2, tile_tokens=32, num_warps=1)),
    ],
)
@pytest.mark.parametrize("kv_format", ["fp16", "e4m3"])
def test_heads_dimensions_and_warps(
    kv_heads: int, group: int, rows: int, dim: int, config: GluonConfig, kv_format: str
) -> None:
    case = make_case(
        kv_heads=kv_heads,
        group=group,
        rows=rows,
        rows_per_group=rows,
        dim=dim,
        kv_format=kv_format,
        gate=True,
    )
    case.check(*run(case, config))


@pytest.mark.parametrize("length", [1, 3, 4, 16, 17, 130])
def test_lengths(length: int) -> None:
    case = make_case(length=length, topk=64, kv_heads=1, group=6, dim=64, kv_format="e4m3")
    case.check(*run(case, GluonConfig(splits=3, tile_tokens=32, num_warps=2)))


def test_more_blocks_than_one_load_lists() -> None:
    """600 blocks: the list of a split is filled in several steps."""
    case = make_case(length=2400, topk=600, rows=2, rows_per_group=2, kv_heads=1, group=2, dim=64)
    case.check(*run(case, GluonConfig(splits=1, tile_tokens=32, num_warps=2)))


def test_groups_of_several_requests() -> None:
    case = make_case(length=61, rows=9, rows_per_group=4, requests=2, dim=64, kv_format="e4m3", gate=True)
    assert sorted(case.inputs.plan.group_rows.tolist()) == [1, 1, 4, 4, 4, 4]
    case.check(*run(case, GluonConfig(splits=1, tile_tokens=32, num_warps=2)))


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_without_tokens_and_padding_groups(splits: int) -> None:
    """Row 1 of group 0 sees nothing; group 1 is padding with undefined lists and writes nothing."""
    case = make_case(requests=2, dim=64, kv_format="fp16", gate=True)
    inputs = case.inputs
    assert inputs.gate is not None
    inputs.gate[1] = torch.nan
    plan = replace(
        inputs.plan,
        masks=torch.stack((inputs.plan.masks[0] & ~0xF0, torch.full_like(inputs.plan.masks[1], -1))),
        counts=torch.stack((inputs.plan.counts[0], torch.full_like(inputs.plan.counts[1], STALE))),
        group_request=torch.tensor([0, -1], dtype=torch.int32, device=DEVICE),
        group_rows=torch.tensor([4, 0], dtype=torch.int32, device=DEVICE),
    )
    changed = replace(case, inputs=replace(inputs, plan=plan))
    out, lse = run(changed, GluonConfig(splits=splits, tile_tokens=32, num_warps=2))
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    others = [0, 2, 3]
    assert out[others].isfinite().all()
    torch.testing.assert_close(lse[others].double(), case.expected_lse[others], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("group", "dim"), [(6, 256), (12, 256), (6, 64)])
@pytest.mark.parametrize("kv_format", ["fp16", "e4m3"])
def test_compiles_without_spills_or_detours(kv_format: str, group: int, dim: int, capability: int) -> None:
    """K and V reach the matrix products without shuffles, and from global memory in wide loads."""
    inputs = make_case(kv_heads=1, group=group, dim=dim, kv_format=kv_format, length=16).inputs
    config = replace(default_gluon_config(inputs, 132), splits=4)
    kernel = compiled(inputs, config, kv_format == "e4m3" and capability == 90, capability)
    assert kernel.stack_bytes == 0
    assert "shfl.sync.idx" not in kernel.ptx
    assert "ld.global.b8" not in kernel.ptx and "ld.global.b16" not in kernel.ptx


def test_the_decoder_assembly_matches_the_formats() -> None:
    assert decode_assembly("fp16", False) is None
    for kv_format in ("e4m3", "e5m2", "e3m4"):
        assert "prmt" in str(decode_assembly(kv_format, False))
    assert "e4m3x2" in str(decode_assembly("e4m3", True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GluonConfig(splits=0, tile_tokens=32, num_warps=2), "splits"),
        (GluonConfig(splits=1, tile_tokens=32, num_warps=4), "num_warps"),
        (GluonConfig(splits=1, tile_tokens=32, num_warps=3), "num_warps"),
        (GluonConfig(splits=1, tile_tokens=48, num_warps=2), "tile_tokens"),
        (GluonConfig(splits=1, tile_tokens=16, num_warps=2), "tile_tokens"),
    ],
)
def test_impossible_configurations_are_refused(config: GluonConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config.check(head_dim=64)


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU of compute capability 8.0 or newer")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(InputError, match="compute capability"):
        page4_attention_gluon(make_case().inputs)


@pytest.mark.parametrize(("capacity", "splits"), [(1, 1), (8, 1), (64, 8), (2052, 3), (4104, 1), (4104, 64)])
def test_a_split_has_room_for_its_turns(capacity: int, splits: int) -> None:
    config = GluonConfig(splits=splits, tile_tokens=32, num_warps=4)
    tiles = -(-capacity // 8)
    turns = listed_turns(capacity, config)
    assert turns > -(-tiles // splits)
    listed = min(turns * 8, 512)
    assert turns * 8 % listed == 0 and listed & (listed - 1) == 0
