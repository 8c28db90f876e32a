"""Launches the Gluon kernels of grouped attention, one for every tensor-core instruction.

Three kernels, one contract (that of :mod:`page4.kernels.page4_attention_triton`):
:mod:`~page4.kernels.page4_attention_volta` on ``mma884`` for compute capability 7.0,
:mod:`~page4.kernels.page4_attention_ampere` on ``mma`` from 8.0 on, and
:mod:`~page4.kernels.page4_attention_hopper` on ``wgmma`` for 9.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import triton
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
from page4.kernels.page4_attention_volta import page4_attention_volta_kernel
from page4.kernels.volta_tiles import MEMBERS, decode_pairs_assembly

Instruction = Literal["mma", "wgmma", "mma884"]
INSTRUCTIONS: tuple[Instruction, ...] = get_args(Instruction)


def volta_members(width: int, kv_format: str, wide_turns: bool) -> int:
    """Members of a program with ``mma884`` and ``width`` dimensions a warp: the most that do not spill.

    ``wide_turns``: of more than 8 tokens a warp; the numbers are for 2 warps, with more of them bytes spill.
    """
    half = kv_format == "fp16"
    if width == 64:
        return 24 if wide_turns else {"fp16": 32, "int8": 40}.get(kv_format, 48)
    return 48 if half else 56 if wide_turns else 64


def formats_of(instruction: Instruction) -> tuple[str, ...]:
    """KV formats that an instruction's kernel reads."""
    return (*GLUON_FORMATS, "int8") if instruction == "mma884" else GLUON_FORMATS


def can_run(instruction: Instruction, capability: tuple[int, int]) -> bool:
    """Whether a GPU has the instruction, or has it at more than the speed of an emulation."""
    if instruction == "mma":
        return capability >= (8, 0)
    return capability == {"wgmma": (9, 0), "mma884": (7, 0)}[instruction]


@dataclass(frozen=True)
class GluonConfig:
    """How a call is cut into programs.

    Attributes:
        splits: programs that share the tokens of one group and KV head, 1..64.
        tile_tokens: tokens of a turn, a power of two, at least 32 and 8 per warp.
        num_warps: a power of two; each warp owns ``D / num_warps >= 32`` dimensions of the output.
        num_stages: turns in shared memory at once, 2..8: one that is computed, the others on their way. With
            ``wgmma``, V has one less.
        instruction: the tensor-core instruction. ``mma`` needs compute capability 8.0. ``wgmma`` needs 9.0, 4
            or 8 warps, at least 16 tokens of a turn per warp, and at most half as many members as a token's
            K has bytes. ``mma884`` needs 7.0, 2 warps or more with 32 or 64 dimensions each and at most 16
            tokens of a turn, and 2 stages (they are in registers); a program has at most 64 members with 32
            dimensions a warp, and 32 with 64.
        head_splits: programs that share the query heads of a KV head, each reading its K and V; a divisor of
            their number. The members of a program are then fewer, and more of them fit a multiple of 16.
    """

    splits: int
    tile_tokens: int
    num_warps: int
    num_stages: int = 2
    instruction: Instruction = "mma"
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
        if self.instruction not in INSTRUCTIONS:
            raise InputError(
                f"instruction must be one of {', '.join(INSTRUCTIONS)}, got {self.instruction!r}"
            )
        if kv_format not in formats_of(self.instruction):
            raise InputError(
                f"{self.instruction} reads {', '.join(formats_of(self.instruction))}, got {kv_format}"
            )
        if self.instruction == "mma884":
            self._check_mma884(head_dim, self.members(heads_per_kv, rows_per_group), kv_format)
        if self.instruction == "wgmma":
            if warps not in (4, 8) or tile < 16 * warps:
                raise InputError(
                    f"wgmma needs 4 or 8 warps and tiles of 16 tokens a warp, got {warps} and {tile}"
                )
            # Probabilities take the place of K.
            members = padded(self.members(heads_per_kv, rows_per_group))
            room = head_dim * STORAGE_DTYPES[kv_format].itemsize // 2
            if members > room:
                raise InputError(
                    f"with wgmma a program has at most {room} members of {head_dim} dimensions in "
                    f"{kv_format}, got {members}: choose more head_splits"
                )

    def members(self, heads_per_kv: int, rows_per_group: int) -> int:
        """Rows of a group times query heads of a program."""
        return rows_per_group * heads_per_kv // self.head_splits

    def _check_mma884(self, head_dim: int, members: int, kv_format: str) -> None:
        warps = self.num_warps
        if head_dim < 64 or warps < 2 or head_dim // warps not in (32, 64):
            raise InputError(
                f"mma884 needs 2 warps or more with 32 or 64 dimensions each, got {warps} for {head_dim}"
            )
        if self.tile_tokens > 16 * warps:
            raise InputError(f"mma884 takes up to 16 tokens a warp, got {self.tile_tokens} for {warps} warps")
        if self.num_stages != 2:
            raise InputError(f"mma884 has 2 stages, got num_stages {self.num_stages}")
        width = head_dim // warps
        room = volta_members(width, kv_format, self.tile_tokens > 8 * warps)
        if members > room:
            raise InputError(
                f"with mma884 and {width} dimensions a warp a program has at most {room} members here, "
                f"got {members}: choose more warps or more head_splits"
            )


def default_gluon_config(inputs: AttentionInputs, multiprocessors: int) -> GluonConfig:
    """A configuration without spills at up to 64 members of a program, for the inputs' GPU."""
    half = inputs.kv_format == "fp16"
    capability = torch.cuda.get_device_capability(inputs.q.device) if inputs.q.is_cuda else None
    if capability == (7, 0):
        return default_volta_config(inputs, multiprocessors)
    wgmma = capability == (9, 0) and inputs.head_dim >= 128
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


def default_volta_config(inputs: AttentionInputs, multiprocessors: int) -> GluonConfig:
    """The same with ``mma884``: 4 warps, or 8 where a program's sums need the room.

    Two programs of 4 warps wait for barriers at different times, and load V in pieces twice as wide.
    """
    dim, kv_format = inputs.head_dim, inputs.kv_format
    lists = inputs.groups * inputs.kv_heads
    head_splits = _head_splits(inputs, volta_members(32, kv_format, dim == 64))
    if 10 * lists <= multiprocessors:
        head_splits = max(head_splits, _volta_head_splits(inputs))
    members = inputs.rows_per_group * inputs.heads_per_kv // head_splits
    num_warps = dim // 64 if dim == 256 and members <= volta_members(64, kv_format, False) else dim // 32
    tile_tokens = max(32, 8 * num_warps)
    tokens = inputs.plan.blocks.shape[1] * BLOCK_TOKENS
    return GluonConfig(
        splits=_volta_splits(lists * head_splits, tokens // tile_tokens, multiprocessors),
        tile_tokens=tile_tokens,
        num_warps=num_warps,
        instruction="mma884",
        head_splits=head_splits,
    )


def _volta_head_splits(inputs: AttentionInputs) -> int:
    """Up to 3 programs for a KV head's query heads, of a full tile of members each.

    Where a step has few lists of tokens it needs many programs. Splits of a list leave FP32 parts of all
    members, which soon are more bytes than K and V; splits of heads read K and V again, from L2.
    """
    heads, rows = inputs.heads_per_kv, inputs.rows_per_group
    return max(
        parts
        for parts in (1, 2, 3)
        if heads % parts == 0 and (parts == 1 or rows * heads // parts >= MEMBERS)
    )


def _volta_splits(programs: int, tiles: int, multiprocessors: int) -> int:
    """Two programs a multiprocessor, and no step that leaves a part of the machine without a second one.

    Many splits are a power of two, to which the merge rounds them up, and at most 32: parts pass through L2.
    """
    wanted = 2 * multiprocessors // max(1, programs)
    if programs < 2 * multiprocessors:
        wanted = max(2, wanted)
    if wanted > 16:
        wanted = 32 if wanted >= 32 else 16
    return max(1, min(wanted, tiles))


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
    """What :func:`~page4.kernels.page4_attention_triton.page4_attention_triton` does, on tensor cores.

    FP16 ``q`` only; formats fp16 and all byte floats, and int8 with ``mma884``.

    Raises:
        InputError: a GPU without the instruction or none, FP32 ``q``, another format, or what the plain
            kernel refuses.
    """
    q = inputs.q
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    if capability is None or not any(can_run(instruction, capability) for instruction in INSTRUCTIONS):
        raise InputError("the Gluon kernels need a GPU of compute capability 7.0, 8.0 or newer")
    if q.dtype != torch.float16:
        raise InputError(f"the Gluon kernel takes float16 queries, got {q.dtype}")
    config = config or default_gluon_config(inputs, multiprocessor_count(q.device))
    config.check(inputs.head_dim, inputs.heads_per_kv, inputs.rows_per_group, inputs.kv_format)
    if not can_run(config.instruction, capability):
        fitting = [instruction for instruction in INSTRUCTIONS if can_run(instruction, capability)]
        raise InputError(
            f"{config.instruction} is not for compute capability {capability[0]}.{capability[1]}, "
            f"which has {' and '.join(fitting)}"
        )
    out, lse = inputs.outputs(out, lse)
    if inputs.groups == 0:
        return out, lse
    native = inputs.kv_format == "e4m3" and capability >= (8, 9)
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
    if k_pages.dtype == torch.uint8 or config.instruction == "mma884":
        k_pages, v_pages = k_pages.view(torch.int32), v_pages.view(torch.int32)
    kernel, constants, options = _variant(inputs, config, native)
    kernel[(inputs.groups, inputs.kv_heads * config.head_splits, config.splits)](
        q, q.stride(0), q.stride(1), k_pages, v_pages,
        inputs.block_tables, inputs.block_tables.stride(0),
        plan.blocks, plan.masks, plan.blocks.shape[1],
        plan.counts, plan.group_request, plan.group_start, plan.group_rows,
        inputs.gate, *inputs.gate_strides, out, lse,
        inputs.softmax_scale * inputs.k_scale * unit * math.log2(math.e), inputs.v_scale * unit,
        HQ=q.shape[1], HKV=inputs.kv_heads, D=inputs.head_dim, ROWS=inputs.rows_per_group,
        PARTS=config.head_splits, SPLITS=config.splits,
        TURNS=listed_turns(
            plan.blocks.shape[1], config.tile_tokens, config.splits, config.num_warps, config.num_stages
        ),
        BN=config.tile_tokens, WARPS=config.num_warps, **constants,
        num_warps=config.num_warps, **options,
    )  # fmt: skip


def volta_registers(config: GluonConfig, head_dim: int, members: int, kv_format: str) -> int:
    """Registers of a thread with ``mma884``: as few as bring more programs to a multiprocessor.

    Of the 65536 there are, 4 programs of 4 warps have room with 128 registers, and 3 with 168.
    """
    narrow = head_dim // config.num_warps == 32
    if kv_format == "fp16":
        fits = {168: 8}
    else:
        fits = {128: 8, 168: 16 if config.tile_tokens > 8 * config.num_warps else 24}
    for registers, most in fits.items():
        if members <= most + 8 * narrow:
            return registers
    return 255


def _variant(
    inputs: AttentionInputs, config: GluonConfig, native: bool
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The kernel of the configuration's instruction, what it alone must know, and how it is compiled."""
    if config.instruction == "mma884":
        members = config.members(inputs.heads_per_kv, inputs.rows_per_group)
        volta = {
            "p_k_token_scales": inputs.k_token_scales,
            "p_v_token_scales": inputs.v_token_scales,
            "DECODE": decode_pairs_assembly(inputs.kv_format),
            "TILES": triton.cdiv(members, MEMBERS),
        }
        registers = volta_registers(config, inputs.head_dim, members, inputs.kv_format)
        return page4_attention_volta_kernel, volta, {"maxnreg": registers}
    dependent = launches_dependents(inputs.q.device)
    members = padded_members(inputs, config.head_splits)
    constants = {
        "DECODE": decode_assembly(inputs.kv_format, native), "BM": members, "STAGES": config.num_stages,
        "DEPENDENT": dependent,
    }  # fmt: skip
    wgmma = config.instruction == "wgmma"
    kernel = page4_attention_hopper_kernel if wgmma else page4_attention_ampere_kernel
    return kernel, constants, {"launch_pdl": dependent}
