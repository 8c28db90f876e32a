"""Launches the Gluon kernels of grouped attention: tensor cores of compute capability 8.0 and newer.

Two kernels, one contract (that of :mod:`page4.kernels.page4_attention_triton`):
:mod:`~page4.kernels.page4_attention_hopper` on ``wgmma`` for compute capability 9.0, and
:mod:`~page4.kernels.page4_attention_ampere` on ``mma`` for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.codecs import STORAGE_DTYPES
from page4.kernels.codecs_triton import BITS_UNIT
from page4.kernels.dependent_launch import launches_dependents
from page4.kernels.errors import InputError
from page4.kernels.gluon_tiles import GLUON_FORMATS, decode_assembly, listed_turns
from page4.kernels.page4_attention_ampere import page4_attention_ampere_kernel
from page4.kernels.page4_attention_hopper import page4_attention_hopper_kernel
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import Partials, check_splits, merge_partials
from page4.kernels.page4_attention_triton import (
    default_splits,
    multiprocessor_count,
    padded,
    padded_members,
)


@dataclass(frozen=True)
class GluonConfig:
    """How a call is cut into programs.

    Attributes:
        splits: programs that share the tokens of one group and KV head, 1..64.
        tile_tokens: tokens of a turn, a power of two, at least 32 and 8 per warp.
        num_warps: a power of two; each warp owns ``D / num_warps >= 32`` dimensions of the output.
        num_stages: turns in shared memory at once, 2..8: one that is computed, the others on their way. With
            ``wgmma``, V has one less.
        instruction: the tensor-core instruction, ``mma`` or ``wgmma``. The latter needs compute capability
            9.0, 4 or 8 warps, at least 16 tokens of a turn per warp, and at most half as many members as a
            token's K has bytes.
        head_splits: programs that share the query heads of a KV head, each reading its K and V; a divisor of
            their number. The members of a program are then fewer, and more of them fit a multiple of 16.
    """

    splits: int
    tile_tokens: int
    num_warps: int
    num_stages: int = 2
    instruction: Literal["mma", "wgmma"] = "mma"
    head_splits: int = 1

    def check(self, head_dim: int, heads_per_kv: int, rows_per_group: int, kv_format: str) -> None:
        """Refuse a configuration that no program can have.

        Raises:
            InputError: a number outside its range.
        """
        check_splits(self.splits)
        warps, tile = self.num_warps, self.tile_tokens
        if warps < 1 or warps & (warps - 1) or 32 * warps > head_dim:
            raise InputError(
                f"num_warps must be a power of two and at most D / 32 = {head_dim // 32}, got {warps}"
            )
        if tile & (tile - 1) or tile < max(32, 8 * warps):
            raise InputError(
                f"tile_tokens must be a power of two >= {max(32, 8 * warps)} for {warps} warps, got {tile}"
            )
        if not 2 <= self.num_stages <= 8:
            raise InputError(f"num_stages must lie in 2..8, got {self.num_stages}")
        if self.head_splits < 1 or heads_per_kv % self.head_splits:
            raise InputError(
                f"head_splits must divide the {heads_per_kv} query heads of a KV head, got {self.head_splits}"
            )
        if self.instruction not in ("mma", "wgmma"):
            raise InputError(f"instruction must be mma or wgmma, got {self.instruction!r}")
        if self.instruction == "wgmma":
            if warps not in (4, 8) or tile < 16 * warps:
                raise InputError(
                    f"wgmma needs 4 or 8 warps and tiles of 16 tokens a warp, got {warps} and {tile}"
                )
            # Probabilities take the place of K.
            members = padded(rows_per_group * heads_per_kv // self.head_splits)
            room = head_dim * STORAGE_DTYPES[kv_format].itemsize // 2
            if members > room:
                raise InputError(
                    f"with wgmma a program has at most {room} members of {head_dim} dimensions in "
                    f"{kv_format}, got {members}: choose more head_splits"
                )


def default_gluon_config(inputs: AttentionInputs, multiprocessors: int) -> GluonConfig:
    """A configuration without spills at up to 64 members of a program, for the inputs' GPU."""
    half = inputs.kv_format == "fp16"
    hopper = inputs.q.is_cuda and torch.cuda.get_device_capability(inputs.q.device) == (9, 0)
    wgmma = hopper and inputs.head_dim >= 128
    head_splits = _head_splits(inputs, 64)
    wide = padded_members(inputs, head_splits) > 32
    if wgmma:
        num_warps, tile_tokens = 4, 64
        if wide and half:
            multiprocessors //= 2  # one program fills the shared memory of one
    else:
        num_warps = min(8 if wide and not half else 4, inputs.head_dim // 32)
        tile_tokens = 64 if num_warps == 8 or (num_warps == 4 and not half) else 32
    tokens = inputs.plan.blocks.shape[1] * BLOCK_TOKENS
    programs = inputs.groups * inputs.kv_heads * head_splits
    return GluonConfig(
        splits=default_splits(programs, tokens, tile_tokens, multiprocessors),
        tile_tokens=tile_tokens,
        num_warps=num_warps,
        instruction="wgmma" if wgmma else "mma",
        head_splits=head_splits,
    )


def _head_splits(inputs: AttentionInputs, members: int) -> int:
    """The fewest programs for a KV head's query heads that have at most ``members`` each, if any have."""
    heads = inputs.heads_per_kv
    divisors = [parts for parts in range(1, heads + 1) if heads % parts == 0]
    fitting = [parts for parts in divisors if inputs.rows_per_group * heads // parts <= members]
    return fitting[0] if fitting else heads


def page4_attention_gluon(
    inputs: AttentionInputs,
    config: GluonConfig | None = None,
    partials: Partials | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`~page4.kernels.page4_attention_triton.page4_attention_triton` does, on sm_80 and newer.

    FP16 ``q`` only; formats fp16, e4m3, e5m2 and e3m4.

    Raises:
        InputError: an older GPU or none, FP32 ``q``, another format, or what the plain kernel refuses.
    """
    q = inputs.q
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) < (8, 0):
        raise InputError("the Gluon kernel needs a GPU of compute capability 8.0 or newer")
    if q.dtype != torch.float16:
        raise InputError(f"the Gluon kernel takes float16 queries, got {q.dtype}")
    if inputs.kv_format not in GLUON_FORMATS:
        raise InputError(f"the Gluon kernel reads {', '.join(GLUON_FORMATS)}, got {inputs.kv_format}")
    config = config or default_gluon_config(inputs, multiprocessor_count(q.device))
    config.check(inputs.head_dim, inputs.heads_per_kv, inputs.rows_per_group, inputs.kv_format)
    if config.instruction == "wgmma" and torch.cuda.get_device_capability(q.device) != (9, 0):
        raise InputError("wgmma is an instruction of compute capability 9.0 alone, use mma")
    out, lse = inputs.outputs(out, lse)
    if inputs.groups == 0:
        return out, lse
    native = inputs.kv_format == "e4m3" and torch.cuda.get_device_capability(q.device) >= (8, 9)
    unit = 1.0 if native else BITS_UNIT[inputs.kv_format]
    v_factor = inputs.v_scale * unit
    if config.splits == 1:
        _launch(inputs, config, native, unit, out, lse)
        return out, lse
    partials = partials or Partials.empty(inputs, config.splits)
    partials.check(inputs, config.splits)
    _launch(inputs, config, native, unit, partials.out, partials.lse)
    merge_partials(partials, inputs, v_factor, out, lse)
    return out, lse


def _launch(
    inputs: AttentionInputs, config: GluonConfig, native: bool, unit: float, out: Tensor, lse: Tensor
) -> None:
    q, plan = inputs.q, inputs.plan
    k_pages, v_pages = inputs.k_pages, inputs.v_pages
    if k_pages.dtype == torch.uint8:
        k_pages, v_pages = k_pages.view(torch.int32), v_pages.view(torch.int32)
    dependent = launches_dependents(q.device)
    members = padded_members(inputs, config.head_splits)
    # Three programs of up to 32 members fit a multiprocessor of compute capability 9.0.
    registers = 168 if config.instruction == "wgmma" and config.num_warps == 4 and members <= 32 else None
    kernel = page4_attention_hopper_kernel if config.instruction == "wgmma" else page4_attention_ampere_kernel
    kernel[(inputs.groups, inputs.kv_heads * config.head_splits, config.splits)](
        q, q.stride(0), q.stride(1), k_pages, v_pages,
        inputs.block_tables, inputs.block_tables.stride(0),
        plan.blocks, plan.masks, plan.blocks.shape[1],
        plan.counts, plan.group_request, plan.group_start, plan.group_rows,
        inputs.gate, *inputs.gate_strides, out, lse,
        inputs.softmax_scale * inputs.k_scale * unit * math.log2(math.e), inputs.v_scale * unit,
        DECODE=decode_assembly(inputs.kv_format, native), HQ=q.shape[1], HKV=inputs.kv_heads,
        D=inputs.head_dim, ROWS=inputs.rows_per_group, PARTS=config.head_splits, SPLITS=config.splits,
        TURNS=listed_turns(
            plan.blocks.shape[1], config.tile_tokens, config.splits, config.num_warps, config.num_stages
        ),
        BM=members, BN=config.tile_tokens,
        STAGES=config.num_stages, WARPS=config.num_warps, DEPENDENT=dependent,
        num_warps=config.num_warps, maxnreg=registers, launch_pdl=dependent,
    )  # fmt: skip
