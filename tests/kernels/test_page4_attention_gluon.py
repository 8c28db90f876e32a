"""Grouped attention in Gluon: on the GPU where there is one, else its PTX on the CPU, against float64.

All kernels, ``mma``, ``wgmma`` and ``mma884``; a GPU runs those whose instruction it has.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from page4.experiments.sm70.compiling import Binary, compile_for
from page4.kernels.codecs import BYTE_FLOATS
from page4.kernels.codecs_triton import BITS_UNIT
from page4.kernels.errors import InputError
from page4.kernels.gluon_tiles import decode_assembly, listed_turns
from page4.kernels.page4_attention_ampere import page4_attention_ampere_kernel
from page4.kernels.page4_attention_gluon import (
    INSTRUCTIONS,
    GluonConfig,
    can_run,
    default_volta_config,
    formats_of,
    page4_attention_gluon,
    volta_members,
    volta_registers,
)
from page4.kernels.page4_attention_hopper import page4_attention_hopper_kernel
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import Partials, merge_partials
from page4.kernels.page4_attention_triton import padded_members
from page4.kernels.page4_attention_volta import page4_attention_volta_kernel
from page4.kernels.volta_tiles import decode_pairs_assembly
from tests.kernels.attention_cases import DEVICE, STALE, Case, assert_near, make_case
from tests.kernels.ptx_emulator import Pointer, run_grid

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
HERE = [name for name in INSTRUCTIONS if CAPABILITY is None or can_run(name, CAPABILITY)]
HAS_GPU = CAPABILITY is not None and bool(HERE)
HAS_HOPPER = HAS_GPU and "wgmma" in HERE
hopper_only = pytest.mark.skipif("wgmma" not in HERE, reason="needs a GPU of compute capability 9.0")
volta_only = pytest.mark.skipif("mma884" not in HERE, reason="needs a GPU of compute capability 7.0")
SHARED_BYTES = {70: 96 * 1024, 80: 163 * 1024, 90: 227 * 1024}  # of a program
KERNELS = {
    "mma": page4_attention_ampere_kernel,
    "wgmma": page4_attention_hopper_kernel,
    "mma884": page4_attention_volta_kernel,
}


def mma884(splits: int, tile_tokens: int, num_warps: int, head_splits: int = 1) -> GluonConfig:
    return GluonConfig(splits, tile_tokens, num_warps, 2, "mma884", head_splits)


def mma(
    splits: int, tile_tokens: int, num_warps: int, num_stages: int = 2, head_splits: int = 1
) -> GluonConfig:
    return GluonConfig(splits, tile_tokens, num_warps, num_stages, "mma", head_splits)


def wgmma(
    splits: int, tile_tokens: int, num_warps: int, num_stages: int = 2, head_splits: int = 1
) -> GluonConfig:
    return GluonConfig(splits, tile_tokens, num_warps, num_stages, "wgmma", head_splits)


def here(*values: object, id: str | None = None) -> Any:
    """Parameters of a test that a GPU without the configuration's instruction cannot run."""
    (config,) = (value for value in values if isinstance(value, GluonConfig))
    reason = f"the GPU has no {config.instruction}"
    return pytest.param(
        *values, id=id, marks=pytest.mark.skipif(config.instruction not in HERE, reason=reason)
    )


def smallest(splits: int) -> Any:
    """Every kernel with the smallest head that it can have without waste."""
    return pytest.mark.parametrize(
        ("dim", "config"),
        [
            here(64, mma(splits, 32, 2), id="mma"),
            here(128, wgmma(splits, 64, 4), id="wgmma"),
            here(64, mma884(splits, 32, 2), id="mma884"),
        ],
    )


def compiled(inputs: AttentionInputs, config: GluonConfig, native: bool, capability: int) -> Binary:
    volta = config.instruction == "mma884"
    pages = "*fp16" if inputs.kv_format == "fp16" and not volta else "*i32"
    signature = {
        "p_q": "*fp16", "stride_q_row": "i32:16", "stride_q_head": "i32:16", "p_k": pages, "p_v": pages,
        "p_tables": "*i64", "stride_table": "i32", "p_blocks": "*i32", "p_masks": "*i32", "capacity": "i32",
        "p_counts": "*i32", "p_group_request": "*i32", "p_group_start": "*i32", "p_group_rows": "*i32",
        "stride_gate_row": "i32:16", "stride_gate_head": "i32:16",
        "p_out": "*fp16" if config.splits == 1 else "*fp32", "p_lse": "*fp32",
        "score_factor": "fp32", "v_factor": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "HQ": inputs.q.shape[1], "HKV": inputs.kv_heads, "D": inputs.head_dim,
        "ROWS": inputs.rows_per_group, "PARTS": config.head_splits, "SPLITS": config.splits,
        "TURNS": listed_turns(
            inputs.plan.blocks.shape[1], config.tile_tokens, config.splits, config.num_warps,
            config.num_stages,
        ),
        "BN": config.tile_tokens, "WARPS": config.num_warps,
    }  # fmt: skip
    options: dict[str, Any] = {}
    if volta:
        members = config.members(inputs.heads_per_kv, inputs.rows_per_group)
        constants |= {"DECODE": decode_pairs_assembly(inputs.kv_format), "TILES": -(-members // 8)}
        options = {"maxnreg": volta_registers(config, inputs.head_dim, members, inputs.kv_format)}
        for name in ("p_k_token_scales", "p_v_token_scales"):
            if inputs.kv_format == "int8":
                signature[name] = "*fp32"
            else:
                constants[name] = None
    else:
        constants |= {
            "DECODE": decode_assembly(inputs.kv_format, native),
            "BM": padded_members(inputs, config.head_splits), "STAGES": config.num_stages,
            "DEPENDENT": capability >= 90,
        }  # fmt: skip
    if inputs.gate is None:
        constants["p_gate"] = None
    else:
        signature["p_gate"] = "*fp16"
    kernel = KERNELS[config.instruction]
    return compile_for(kernel, signature, constants, capability, num_warps=config.num_warps, **options)


def pointer(tensor: Tensor) -> Pointer:
    """Into the storage of a tensor, which may be a view with any strides."""
    whole = tensor if tensor._base is None else tensor._base
    return Pointer(whole.numpy(), tensor.storage_offset() * tensor.element_size())


def emulate(case: Case, config: GluonConfig, native: bool) -> tuple[Tensor, Tensor]:
    """The launcher's steps with the emulator in the place of the GPU."""
    inputs, plan = case.inputs, case.inputs.plan
    config.check(inputs.head_dim, inputs.heads_per_kv, inputs.rows_per_group, inputs.kv_format)
    capability = 70 if config.instruction == "mma884" else 80
    if native or config.instruction == "wgmma":
        capability = 90
    kernel = compiled(inputs, config, native, capability)
    assert kernel.shared_bytes <= SHARED_BYTES[capability]
    unit = 1.0 if native else BITS_UNIT[inputs.kv_format]
    out, lse = inputs.outputs(None, None)
    partials = Partials.empty(inputs, config.splits)
    for tensor in (out, lse, partials.out, partials.lse):
        tensor.fill_(torch.nan)
    to = (out, lse) if config.splits == 1 else (partials.out, partials.lse)
    gate = [] if inputs.gate is None else [pointer(inputs.gate)]
    scales = [x for x in (inputs.k_token_scales, inputs.v_token_scales) if x is not None]
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
            *map(pointer, scales),
        ],
        (inputs.groups, inputs.kv_heads * config.head_splits, config.splits),
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
    [
        ("fp16", False),
        ("e4m3", False),
        ("e4m3", True),
        ("e5m2", False),
        ("e3m4", False),
        ("e2m5", False),
        ("int8", False),
    ],
)
@pytest.mark.parametrize(
    "config",
    [
        here(mma(2, 32, 4), id="mma"),
        here(wgmma(2, 64, 4), id="wgmma"),
        here(mma884(2, 32, 4), id="mma884"),
        here(mma884(2, 64, 8), id="mma884-8"),
    ],
)
def test_formats(config: GluonConfig, kv_format: str, native: bool) -> None:
    """Of two splits and with scales far from one, where a format has them."""
    if native and config.instruction == "mma884":
        pytest.skip("it converts nothing natively")
    if kv_format not in formats_of(config.instruction):
        pytest.skip("the plain kernel reads it")
    scales = {} if kv_format == "fp16" else {"k_scale": 0.3, "v_scale": 37.5}
    case = make_case(kv_heads=1, group=6, dim=256, kv_format=kv_format, gate=True, topk=12, **scales)
    case.check(*run(case, config, native))


@pytest.mark.parametrize(
    ("kv_heads", "group", "rows", "dim", "config"),
    [
        here(2, 8, 4, 256, mma(splits=1, tile_tokens=64, num_warps=8)),
        here(1, 16, 8, 64, mma(splits=1, tile_tokens=32, num_warps=2)),
        here(1, 5, 7, 128, mma(splits=3, tile_tokens=64, num_warps=4)),
        here(3, 1, 1, 128, mma(splits=1, tile_tokens=128, num_warps=1)),
        here(2, 3, 5, 32, mma(splits=2, tile_tokens=32, num_warps=1)),
        here(2, 6, 8, 64, mma(splits=1, tile_tokens=32, num_warps=2, head_splits=3)),
        here(2, 12, 8, 64, mma(splits=2, tile_tokens=32, num_warps=2, head_splits=12)),
        here(1, 12, 4, 256, wgmma(splits=1, tile_tokens=64, num_warps=4)),
        here(1, 8, 8, 128, wgmma(splits=1, tile_tokens=64, num_warps=4)),
        here(1, 5, 7, 128, wgmma(splits=3, tile_tokens=128, num_warps=4)),
        here(2, 1, 1, 256, wgmma(splits=1, tile_tokens=64, num_warps=4)),
        here(2, 6, 8, 128, wgmma(splits=1, tile_tokens=64, num_warps=4, head_splits=3)),
        here(1, 12, 8, 128, wgmma(splits=2, tile_tokens=64, num_warps=4, head_splits=12)),
        here(2, 6, 4, 256, mma884(splits=1, tile_tokens=32, num_warps=4)),
        here(1, 12, 4, 256, mma884(splits=2, tile_tokens=64, num_warps=8)),
        here(1, 16, 6, 64, mma884(splits=1, tile_tokens=32, num_warps=2, head_splits=2)),
        here(1, 5, 7, 128, mma884(splits=3, tile_tokens=64, num_warps=4)),
        here(3, 1, 1, 128, mma884(splits=1, tile_tokens=32, num_warps=2)),
        here(2, 3, 5, 64, mma884(splits=2, tile_tokens=32, num_warps=2)),
        here(2, 12, 8, 128, mma884(splits=2, tile_tokens=32, num_warps=4, head_splits=12)),
    ],
)
@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "int8"])
def test_heads_dimensions_and_warps(
    kv_heads: int, group: int, rows: int, dim: int, config: GluonConfig, kv_format: str
) -> None:
    if kv_format not in formats_of(config.instruction):
        pytest.skip("the plain kernel reads it")
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


@volta_only
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("decades", [4.0, 8.0])
def test_scales_of_tokens_may_differ_by_any_factor(decades: float, splits: int) -> None:
    """A weight in FP16 is as precise as its token counts, and tokens whose V is 0 still count as tokens."""
    for seed in range(3):
        case = make_case(length=150, topk=30, dim=64, kv_format="int8", gate=True, decades=decades, seed=seed)
        case.check(*run(case, mma884(splits, 32, 2)))


@volta_only
@pytest.mark.parametrize("splits", [1, 2])
def test_values_of_zero_count_as_tokens(splits: int) -> None:
    case = make_case(dim=64, kv_format="int8")
    assert case.inputs.v_token_scales is not None
    case.inputs.v_pages.zero_()
    case.inputs.v_token_scales.fill_(torch.finfo(torch.float32).tiny)
    out, lse = run(case, mma884(splits, 32, 2))
    assert (out == 0).all()
    torch.testing.assert_close(lse.double(), case.expected_lse, rtol=1e-5, atol=2e-5)


@volta_only
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", ["k_token_scales", "v_token_scales"])
def test_nan_scales_reach_the_rows_that_see_their_token(name: str, splits: int) -> None:
    """The last token, which the last row alone sees. (Other rows' outputs get 0 times a NaN of V.)"""
    case = make_case(length=78, dim=64, kv_format="int8")
    inputs, last = case.inputs, 77
    scales = getattr(inputs, name)
    scales[inputs.block_tables[0, last // 16], :, last % 16] = torch.nan
    out, lse = run(case, mma884(splits, 32, 2))
    assert out[3].isnan().all()
    torch.testing.assert_close(lse[:3].double(), case.expected_lse[:3], rtol=1e-5, atol=2e-5)
    if name == "k_token_scales":
        assert_near(out[:3], case.expected[:3], case.magnitude[:3])


@hopper_only
@pytest.mark.parametrize(("group", "splits"), [(12, 1), (16, 2)])
def test_eight_warps_of_wgmma(group: int, splits: int) -> None:
    """Two warpgroups, which FP16 pages leave no shared memory for."""
    case = make_case(length=300, topk=70, kv_heads=1, group=group, dim=256, kv_format="e3m4", gate=True)
    case.check(*run(case, wgmma(splits=splits, tile_tokens=128, num_warps=8)))


@hopper_only
def test_probabilities_have_room_in_the_place_of_keys() -> None:
    """They take 2 bytes a token and member where a token's K had its bytes."""
    wgmma(splits=1, tile_tokens=64, num_warps=4).check(128, 16, 4, "e4m3")
    wgmma(splits=1, tile_tokens=64, num_warps=4).check(128, 16, 8, "fp16")
    with pytest.raises(InputError, match="at most 64 members of 128 dimensions in e4m3, got 128"):
        wgmma(splits=1, tile_tokens=64, num_warps=4).check(128, 16, 8, "e4m3")


@smallest(splits=3)
@pytest.mark.parametrize("length", [1, 3, 4, 16, 17, 130])
def test_lengths(length: int, dim: int, config: GluonConfig) -> None:
    case = make_case(length=length, topk=64, kv_heads=1, group=6, dim=dim, kv_format="e4m3")
    case.check(*run(case, config))


@pytest.mark.parametrize(
    ("dim", "config"),
    [
        here(64, mma(1, 32, 2, 3)),
        here(64, mma(2, 32, 2, 8)),
        here(128, wgmma(1, 64, 4, 3)),
        here(128, wgmma(2, 64, 4, 4)),
    ],
)
@pytest.mark.parametrize("kv_format", ["fp16", "e4m3"])
def test_several_turns_on_their_way(dim: int, config: GluonConfig, kv_format: str) -> None:
    """More turns than stages, and fewer."""
    for length in (600, 70):
        case = make_case(length=length, topk=150, kv_heads=1, group=6, dim=dim, kv_format=kv_format)
        case.check(*run(case, config))


@smallest(splits=1)
def test_more_blocks_than_one_load_lists(dim: int, config: GluonConfig) -> None:
    """600 blocks: the list of a split is filled in several steps."""
    case = make_case(length=2400, topk=600, rows=2, rows_per_group=2, kv_heads=1, group=2, dim=dim)
    case.check(*run(case, config))


@smallest(splits=1)
def test_groups_of_several_requests(dim: int, config: GluonConfig) -> None:
    case = make_case(length=61, rows=9, rows_per_group=4, requests=2, dim=dim, kv_format="e4m3", gate=True)
    assert sorted(case.inputs.plan.group_rows.tolist()) == [1, 1, 4, 4, 4, 4]
    case.check(*run(case, config))


@smallest(splits=1)
@pytest.mark.parametrize("splits", [1, 2])
def test_rows_without_tokens_and_padding_groups(splits: int, dim: int, config: GluonConfig) -> None:
    """Row 1 of group 0 sees nothing; group 1 is padding with undefined lists and writes nothing."""
    case = make_case(requests=2, dim=dim, kv_format="fp16", gate=True)
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
    out, lse = run(changed, replace(config, splits=splits))
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    others = [0, 2, 3]
    assert out[others].isfinite().all()
    torch.testing.assert_close(lse[others].double(), case.expected_lse[others], rtol=1e-5, atol=2e-5)


def check_loads(kernel: Binary) -> None:
    """K and V reach the matrix products without shuffles, and from global memory in wide loads."""
    assert "shfl.sync.idx" not in kernel.ptx
    assert "ld.global.b8" not in kernel.ptx and "ld.global.b16" not in kernel.ptx


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("group", "dim", "kv_format", "config"),
    [
        (6, 256, "fp16", mma(4, 32, 4)),
        (6, 256, "e4m3", mma(4, 64, 4)),
        (12, 256, "fp16", mma(4, 32, 4)),
        (12, 256, "e4m3", mma(4, 64, 8)),
        (6, 64, "fp16", mma(4, 32, 2)),
        (6, 64, "e4m3", mma(4, 32, 2)),
    ],
)
def test_mma_compiles_without_spills_or_detours(
    group: int, dim: int, kv_format: str, config: GluonConfig, capability: int
) -> None:
    inputs = make_case(kv_heads=1, group=group, dim=dim, kv_format=kv_format, length=16).inputs
    kernel = compiled(inputs, config, kv_format == "e4m3" and capability == 90, capability)
    assert kernel.stack_bytes == 0
    assert "mma.sync" in kernel.ptx and "wgmma" not in kernel.ptx
    check_loads(kernel)


@pytest.mark.parametrize(
    ("group", "dim", "kv_format", "config", "stack_bytes"),
    [
        (6, 256, "fp16", wgmma(4, 64, 4), 0),
        (6, 256, "e4m3", wgmma(4, 64, 4), 0),
        (6, 256, "e3m4", wgmma(1, 64, 4), 0),
        (12, 256, "e4m3", wgmma(4, 128, 8), 16),
        (12, 128, "fp16", wgmma(4, 64, 4), 0),
        (4, 128, "e4m3", wgmma(1, 64, 4, 3), 0),
    ],
)
def test_wgmma_compiles_without_spills_or_detours(
    group: int, dim: int, kv_format: str, config: GluonConfig, stack_bytes: int
) -> None:
    inputs = make_case(kv_heads=1, group=group, dim=dim, kv_format=kv_format, length=16).inputs
    kernel = compiled(inputs, config, kv_format == "e4m3", 90)
    assert kernel.stack_bytes <= stack_bytes
    assert "wgmma.mma_async" in kernel.ptx and "mma.sync" not in kernel.ptx
    check_loads(kernel)


@volta_only
@pytest.mark.parametrize(
    ("group", "rows", "dim", "config"),
    [
        (6, 4, 256, mma884(4, 32, 4)),
        (6, 1, 256, mma884(4, 32, 4)),
        (12, 4, 256, mma884(4, 32, 4)),
        (12, 4, 256, mma884(4, 64, 8)),
        (6, 8, 256, mma884(1, 64, 8)),
        (6, 4, 128, mma884(4, 32, 2)),
        (6, 4, 128, mma884(4, 32, 4)),
        (12, 4, 64, mma884(4, 32, 2)),
    ],
)
@pytest.mark.parametrize("kv_format", formats_of("mma884"))
def test_mma884_compiles_without_spills_or_detours(
    group: int, rows: int, dim: int, kv_format: str, config: GluonConfig
) -> None:
    """K and V go from wide loads to the products: nothing but scores and weights moves between threads."""
    inputs = make_case(
        kv_heads=1, group=group, rows=rows, rows_per_group=rows, dim=dim, kv_format=kv_format, length=16
    ).inputs
    members = config.members(group, rows)
    wide_turns = config.tile_tokens > 8 * config.num_warps
    if members > volta_members(dim // config.num_warps, kv_format, wide_turns):
        with pytest.raises(InputError, match="more warps or more head_splits"):
            config.check(dim, group, rows, kv_format)
        return
    config.check(dim, group, rows, kv_format)
    kernel = compiled(inputs, config, False, 70)
    assert kernel.stack_bytes == 0
    assert kernel.registers <= volta_registers(config, dim, members, kv_format)
    # Each instruction of S has 16 numbers of a lane's token, each of O a step of 4 tokens and 32 dimensions.
    tiles, warps = -(-members // 8), config.num_warps
    products = config.tile_tokens // (8 * warps) * dim // 16 + config.tile_tokens // 4 * dim // (32 * warps)
    assert kernel.ptx.count("mma.sync.aligned.m8n8k4") == tiles * products
    assert "shfl.sync.idx" not in kernel.ptx and "cp.async" not in kernel.ptx
    check_loads(kernel)


@pytest.mark.parametrize(
    ("requests", "rows", "group", "splits", "head_splits"),
    [
        (1, 4, 6, 32, 3),
        (4, 4, 6, 13, 3),
        (16, 4, 6, 10, 1),
        (64, 4, 6, 2, 1),
        (128, 4, 12, 2, 1),
        (160, 4, 6, 1, 1),
        (1, 1, 6, 32, 1),  # no more programs than have a tile of eight members
        (1, 4, 5, 32, 1),
        (3, 2, 16, 16, 2),
    ],
)
def test_default_splits_of_a_v100(
    requests: int, rows: int, group: int, splits: int, head_splits: int
) -> None:
    """Heads first where lists are few; then two programs a multiprocessor, and not just one."""
    case = make_case(requests=1, kv_heads=1, group=group, rows=rows, rows_per_group=rows, dim=256, length=16)
    plan = case.inputs.plan
    blocks = torch.zeros(requests, 1024, dtype=torch.int32, device=plan.blocks.device)  # room for 4096 tokens
    inputs = replace(
        case.inputs,
        plan=replace(plan, blocks=blocks, masks=blocks, **{
            name: getattr(plan, name)[:1].repeat(requests)
            for name in ("counts", "group_request", "group_start", "group_rows")
        }),
    )  # fmt: skip
    config = default_volta_config(inputs, 80)
    assert (config.splits, config.head_splits) == (splits, head_splits)
    config.check(256, group, rows, "fp16")


def test_the_decoder_assembly_matches_the_formats() -> None:
    assert decode_assembly("fp16", False) is None
    for kv_format in BYTE_FLOATS:
        assert "prmt" in str(decode_assembly(kv_format, False))
    assert "e4m3x2" in str(decode_assembly("e4m3", True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (mma(splits=0, tile_tokens=32, num_warps=2), "splits"),
        (mma(splits=1, tile_tokens=32, num_warps=8), "num_warps"),
        (mma(splits=1, tile_tokens=32, num_warps=3), "num_warps"),
        (mma(splits=1, tile_tokens=48, num_warps=2), "tile_tokens"),
        (mma(splits=1, tile_tokens=16, num_warps=2), "tile_tokens"),
        (mma(splits=1, tile_tokens=32, num_warps=2, num_stages=1), "num_stages"),
        (mma(splits=1, tile_tokens=32, num_warps=2, num_stages=9), "num_stages"),
        (mma(splits=1, tile_tokens=32, num_warps=2, head_splits=0), "head_splits"),
        (mma(splits=1, tile_tokens=32, num_warps=2, head_splits=4), "head_splits"),
        (wgmma(splits=1, tile_tokens=64, num_warps=2), "wgmma needs 4 or 8 warps"),
        (wgmma(splits=1, tile_tokens=32, num_warps=4), "16 tokens a warp"),
        (replace(mma(splits=1, tile_tokens=32, num_warps=2), instruction="fma"), "instruction"),
        (mma884(splits=1, tile_tokens=32, num_warps=1), "2 warps or more with 32 or 64 dimensions"),
        (replace(mma884(splits=1, tile_tokens=32, num_warps=2), num_stages=3), "2 stages"),
    ],
)
def test_impossible_configurations_are_refused(config: GluonConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config.check(head_dim=128, heads_per_kv=6, rows_per_group=4, kv_format="e4m3")


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU that Gluon kernels run on")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(InputError, match="compute capability"):
        page4_attention_gluon(make_case().inputs)


@pytest.mark.parametrize("num_stages", [2, 5])
@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize(("capacity", "splits"), [(1, 1), (8, 1), (64, 8), (2052, 3), (4104, 1), (4104, 64)])
def test_a_split_has_room_for_its_turns(capacity: int, splits: int, num_warps: int, num_stages: int) -> None:
    """And for those that are fetched past its end; whole loads list them."""
    turns = listed_turns(capacity, 32, splits, num_warps, num_stages)
    tiles = -(-capacity // 8)
    assert turns >= -(-tiles // splits) + num_stages - 1
    entries, threads = turns * 8, 32 * num_warps
    assert entries & (entries - 1) == 0 if entries < threads else entries % threads == 0
