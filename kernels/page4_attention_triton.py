"""Grouped attention over a packed plan in plain Triton: portable, and readable beside the reference."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.codecs_triton import BITS_UNIT, decode_words
from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import (
    LN2,
    MAX_SPLITS,
    Partials,
    check_splits,
    gated,
    merge_partials,
)

_SMALLEST_DOT = 16  # rows and tokens of a tensor-core tile


@dataclass(frozen=True)
class AttentionConfig:
    """How a call is cut into programs.

    Attributes:
        splits: programs that share the tokens of one group and KV head, 1..64.
        tile_tokens: tokens in registers at once, a power of two from 16 on.
        num_warps, num_stages: Triton's; stages are tiles in flight where the GPU copies asynchronously.
    """

    splits: int
    tile_tokens: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        """Refuse what no program can have.

        Raises:
            InputError: splits outside 1..64, or tiles that are no power of two from 16 on.
        """
        check_splits(self.splits)
        tile = self.tile_tokens
        if tile < _SMALLEST_DOT or tile & (tile - 1):
            raise InputError(f"tile_tokens must be a power of two from {_SMALLEST_DOT} on, got {tile}")


def padded(members: int) -> int:
    """The next power of two from 16 on: rows of a matrix product."""
    return max(_SMALLEST_DOT, triton.next_power_of_2(members))


def padded_members(inputs: AttentionInputs, head_splits: int = 1) -> int:
    """A group's rows times a program's heads, padded."""
    return padded(inputs.rows_per_group * inputs.heads_per_kv // head_splits)


@cache
def multiprocessor_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter's CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def default_splits(programs: int, capacity_tokens: int, tile_tokens: int, multiprocessors: int) -> int:
    """Splits that give every multiprocessor about two programs, without a split of less than a tile."""
    wanted = 2 * multiprocessors // max(1, programs)
    return max(1, min(wanted, capacity_tokens // tile_tokens, MAX_SPLITS))


def default_config(
    inputs: AttentionInputs, multiprocessors: int, tensor_cores: bool = True
) -> AttentionConfig:
    """A configuration that compiles without spills (for 4 rows) and fills ``multiprocessors``.

    ``tensor_cores``: whether Triton uses them, which it does from compute capability 8.0 on. Without them
    operands take so many registers that tiles have to be small.
    """
    accumulators = padded_members(inputs) * inputs.head_dim
    if not tensor_cores:
        tile_tokens = 16
    elif inputs.q.dtype == torch.float32 or accumulators >= 64 * 256:
        tile_tokens = 32
    else:
        tile_tokens = 64
    tokens = inputs.plan.blocks.shape[1] * BLOCK_TOKENS
    return AttentionConfig(
        splits=default_splits(inputs.groups * inputs.kv_heads, tokens, tile_tokens, multiprocessors),
        tile_tokens=tile_tokens,
        num_warps=8 if accumulators >= 32 * 256 else 4,
        num_stages=2 if tensor_cores else 1,
    )


@triton.jit
def _pair(b_word):
    """The two FP16 numbers of int32 words, on a new last axis."""
    b_low = b_word.to(tl.uint16).to(tl.float16, bitcast=True)
    b_high = (b_word.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(b_low, b_high)


@triton.jit
def _load_values(p_pages, o_slot, m_seen, D: tl.constexpr, FORMAT: tl.constexpr):
    """Values of token slots ``[BN]`` over ``BITS_UNIT``, ``[BN, D]``; 0 where a slot is not seen.

    Byte formats come as words of four codes. Decoding pairs takes half the instructions of decoding elements,
    and the joins keep Triton from moving the bytes through shared memory one by one before it decodes them.
    """
    if FORMAT == "fp16" or FORMAT == "fp32":
        o_dim = tl.arange(0, D)
        return tl.load(p_pages + o_slot[:, None] * D + o_dim[None, :], mask=m_seen[:, None], other=0.0)
    else:
        WORDS: tl.constexpr = D // 4
        o_word = tl.arange(0, WORDS)
        p_word = p_pages + o_slot[:, None] * WORDS + o_word[None, :]
        b_word = tl.load(p_word, mask=m_seen[:, None], other=0)  # [BN, WORDS]
        if FORMAT == "int8":
            # The code plus 128 becomes the last mantissa bits of 1024.
            b_even = ((b_word & 0x00FF00FF) ^ 0x00800080) | 0x64006400
            b_odd = (((b_word >> 8) & 0x00FF00FF) ^ 0x00800080) | 0x64006400
        else:
            b_even, b_odd = decode_words(b_word, FORMAT)  # bytes 0 and 2, bytes 1 and 3
        b_values = tl.join(_pair(b_even), _pair(b_odd))  # [BN, WORDS, upper half, odd]
        if FORMAT == "int8":
            b_values = b_values - 1152.0
        return tl.reshape(b_values, [o_slot.shape[0], D])


@triton.jit
def page4_attention_kernel(
    p_q, stride_q_row, stride_q_head, p_k, p_v, p_k_token_scales, p_v_token_scales,
    p_tables, stride_table, p_blocks, p_masks, capacity,
    p_counts, p_group_request, p_group_start, p_group_rows,
    p_gate, stride_gate_row, stride_gate_head, p_out, p_lse, score_factor, v_factor,
    FORMAT: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program attends all rows of a group and all query heads of a KV head over its share of the tokens.

    ``BM`` rows are (row of the group, head), ``BN`` tokens a tile. Tiles are dealt to the splits in turn.
    With one split the output is finished here; otherwise ``p_out`` and ``p_lse`` are the split's partials.
    ``score_factor`` includes ``log2 e``: the softmax is one of powers of two.
    """
    start_dependent(DEPENDENT)
    i_group, i_head, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HQ // HKV
    COMPUTE: tl.constexpr = tl.float32 if FORMAT == "fp32" else p_q.dtype.element_ty
    rows = tl.load(p_group_rows + i_group)
    if rows == 0:
        return  # a padding group, whose count is not defined
    count = tl.load(p_counts + i_group)
    p_table = p_tables + tl.load(p_group_request + i_group).to(tl.int64) * stride_table
    o_list = i_group.to(tl.int64) * capacity

    o_member = tl.arange(0, BM)
    o_row = o_member // GROUP  # [BM] row of the group
    m_row = o_row < tl.minimum(rows, ROWS)  # [BM]
    o_head = i_head * GROUP + o_member % GROUP  # [BM]
    o_step_row = (tl.load(p_group_start + i_group) + o_row).to(tl.int64)  # [BM]
    o_dim = tl.arange(0, D)
    o_q = o_step_row * stride_q_row + o_head * stride_q_head
    b_q = tl.load(p_q + o_q[:, None] + o_dim[None, :], mask=m_row[:, None], other=0.0).to(COMPUTE)

    o_token = tl.arange(0, BN)
    o_bit = tl.minimum(o_row, 7) * 4  # [BM] where the row's bits of a mask word begin
    b_max = tl.full([BM], -float("inf"), dtype=tl.float32)
    b_sum = tl.zeros([BM], dtype=tl.float32)
    b_acc = tl.zeros([BM, D], dtype=tl.float32)
    for tile in range(i_split, tl.cdiv(count, BN // 4), SPLITS):
        o_entry = tile * (BN // 4) + o_token // 4  # [BN]
        b_word = tl.load(p_masks + o_list + o_entry, mask=o_entry < count, other=0)
        b_bits = b_word >> (o_token % 4)  # [BN] bit 4 m: row m sees the token
        # Slots that no row sees are not read: they may hold NaN, and their pages may not exist.
        m_seen = (b_bits & 0x11111111) != 0  # [BN]
        b_block = tl.load(p_blocks + o_list + o_entry, mask=m_seen, other=0)
        b_page = tl.load(p_table + b_block // 4, mask=m_seen, other=0)  # [BN] int64
        o_slot = (b_page * HKV + i_head) * 16 + (b_block % 4) * 4 + o_token % 4  # [BN]
        b_k = _load_values(p_k, o_slot, m_seen, D, FORMAT).to(COMPUTE)  # [BN, D]
        b_v = _load_values(p_v, o_slot, m_seen, D, FORMAT)

        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * score_factor  # [BM, BN]
        if FORMAT == "int8":
            b_s *= tl.load(p_k_token_scales + o_slot, mask=m_seen, other=0.0)[None, :]
            # V times its scale has the range of an FP16 cache; weights times scales might be too small.
            b_v = b_v * tl.load(p_v_token_scales + o_slot, mask=m_seen, other=0.0)[:, None]
        m_s = m_row[:, None] & (((b_bits[None, :] >> o_bit[:, None]) & 1) != 0)  # [BM, BN]
        b_s = tl.where(m_s, b_s, -float("inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
        # While a row has seen nothing its maximum is -inf; subtracting 0 gives weights of 0 and not NaN.
        b_shift = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_shift[:, None])  # [BM, BN]
        b_alpha = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_alpha + tl.sum(b_p, axis=1)
        b_acc = tl.dot(b_p.to(COMPUTE), b_v.to(COMPUTE), b_acc * b_alpha[:, None], input_precision="ieee")
        b_max = b_new_max

    m_live = b_sum != 0.0  # NaN stays
    b_sum = tl.where(m_live, b_sum, 1.0)
    b_lse = tl.where(m_live, b_max + tl.log2(b_sum), -float("inf"))
    b_out = b_acc * (1.0 / b_sum)[:, None]
    if SPLITS == 1:
        o_gate = (o_step_row * stride_gate_row + o_head * stride_gate_head)[:, None] + o_dim[None, :]
        # A row without tokens is 0, whatever its gate holds.
        b_out = gated(b_out * v_factor, p_gate, o_gate, (m_row & m_live)[:, None])
        b_lse *= LN2
        o_out = o_step_row * HQ + o_head  # [BM]
    else:
        o_out = ((i_group.to(tl.int64) * SPLITS + i_split) * HKV + i_head) * (ROWS * GROUP) + o_member
    o_write = o_out[:, None] * D + o_dim[None, :]
    tl.store(p_out + o_write, b_out.to(p_out.dtype.element_ty), mask=m_row[:, None])
    tl.store(p_lse + o_out, b_lse, mask=m_row)


def page4_attention_triton(
    inputs: AttentionInputs,
    config: AttentionConfig | None = None,
    partials: Partials | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every row over the tokens that its plan lets it see, times the output gate.

    The contract of :func:`~page4.kernels.page4_attention.page4_attention_reference`, with the gate::

        out = sigmoid(gate) * v_scale * sum_t softmax(softmax_scale * k_scale * (q . K_t)) * V_t

    Products are FP16 with FP32 accumulation for an FP16 ``q`` (probabilities are rounded to FP16 before they
    meet V), FP32 for an FP32 ``q``. Softmax, LSE, partials and accumulators are FP32.

    ``partials``, ``out`` and ``lse`` may be given, so that nothing is allocated (CUDA graphs); ``partials``
    are needed with more than one split. Returns ``out`` ``[N, Hq, D]`` in q's dtype and ``lse`` FP32
    ``[N, Hq]`` (natural logarithm). A row without tokens gives 0 and -inf; a row that belongs to no group is
    not written. Nothing synchronises with the host.

    Raises:
        InputError: a configuration that no program can have, or tensors of the wrong shape or dtype.
    """
    device = inputs.q.device
    if config is None:
        tensor_cores = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
        config = default_config(inputs, multiprocessor_count(device), tensor_cores)
    out, lse = inputs.outputs(out, lse)
    v_factor = inputs.v_scale * BITS_UNIT[inputs.kv_format]
    if inputs.groups == 0:
        return out, lse
    if config.splits == 1:
        _launch(inputs, config, v_factor, out, lse)
        return out, lse
    partials = partials or Partials.empty(inputs, config.splits)
    partials.check(inputs, config.splits)
    _launch(inputs, config, v_factor, partials.out, partials.lse)
    merge_partials(partials, inputs, v_factor, out, lse)
    return out, lse


def _launch(
    inputs: AttentionInputs, config: AttentionConfig, v_factor: float, out: Tensor, lse: Tensor
) -> None:
    q, plan = inputs.q, inputs.plan
    k_pages, v_pages = inputs.k_pages, inputs.v_pages
    if k_pages.dtype == torch.uint8:
        k_pages, v_pages = k_pages.view(torch.int32), v_pages.view(torch.int32)
    score_factor = inputs.softmax_scale * inputs.k_scale * BITS_UNIT[inputs.kv_format] * math.log2(math.e)
    dependent = launches_dependents(q.device)
    page4_attention_kernel[(inputs.groups, inputs.kv_heads, config.splits)](
        q, q.stride(0), q.stride(1),
        k_pages, v_pages, inputs.k_token_scales, inputs.v_token_scales,
        inputs.block_tables, inputs.block_tables.stride(0),
        plan.blocks, plan.masks, plan.blocks.shape[1],
        plan.counts, plan.group_request, plan.group_start, plan.group_rows,
        inputs.gate, *inputs.gate_strides, out, lse,
        score_factor, v_factor,
        FORMAT=inputs.kv_format, HQ=q.shape[1], HKV=inputs.kv_heads, D=inputs.head_dim,
        ROWS=inputs.rows_per_group, SPLITS=config.splits, BM=padded_members(inputs), BN=config.tile_tokens,
        DEPENDENT=dependent, launch_pdl=dependent,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
