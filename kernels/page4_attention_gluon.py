"""Grouped attention over a packed plan in Gluon, for tensor cores of compute capability 8.0 and newer.

The contract of :mod:`page4.kernels.page4_attention_triton`. What is different is how bytes travel: K and V are
copied as stored, asynchronously and several turns ahead, into a ring in shared memory. From there they go in
wide loads straight into the registers that feed ``mma.m16n8k16`` and are decoded there, without a shuffle. That
works because the instruction does not care in which order a sum runs:

- ``S = Q K^T``. Each warp owns whole tokens. A lane holds up to 16 bytes of one token that lie together; Q is
  laid out in shared memory so that the same dimensions meet (``k_width`` of the operand layouts).
- ``O = P V``. Each warp owns a slice of the head's dimensions. Columns of O are numbered so that a lane's
  columns in successive instructions are dimensions that lie together: its loads are as wide as that run.
- The softmax between them passes P through shared memory, as every warp needs all tokens of it.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.codecs_triton import BITS_UNIT
from page4.kernels.dependent_launch import launches_dependents
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import Partials, check_splits, merge_partials
from page4.kernels.page4_attention_triton import default_splits, multiprocessor_count, padded_members

GLUON_FORMATS = ("fp16", "e4m3", "e5m2", "e3m4")
_LN2 = gl.constexpr(math.log(2.0))


def decode_assembly(kv_format: str, native: bool) -> str | None:
    """PTX that decodes word ``$4``, four codes, to FP16 numbers ``$0`` to ``$3``; None for FP16 pages.

    By bits: two bytes at a time are spread to the halves of x, where exponent and mantissa move next to each
    other under the sign; the numbers are then over ``BITS_UNIT``. ``native`` (e4m3 on compute capability 8.9
    and newer) converts two codes with one instruction, and to their values.
    """
    if kv_format == "fp16":
        return None
    if native:
        lines = ["cvt.rn.f16x2.e4m3x2 x, low;", "cvt.rn.f16x2.e4m3x2 x, high;"]
        declare = ".reg .b16 low, high; mov.b32 {low, high}, $4;"
    else:
        # A prmt selector names a byte of $4 for each byte of x, and 4 for a zero.
        selectors = ("0x1404", "0x3424") if kv_format == "e5m2" else ("0x4140", "0x4342")
        move = {
            # Adding the sign bit to itself carries it one place further up.
            "e4m3": "and.b32 s, x, 0x00800080; add.u32 x, x, s; shl.b32 x, x, 7;",
            "e3m4": "and.b32 s, x, 0x00800080; mad.lo.u32 x, s, 3, x; shl.b32 x, x, 6;",
            "e5m2": "",
        }[kv_format]
        lines = [f"prmt.b32 x, $4, 0, {selector}; {move}" for selector in selectors]
        declare = ".reg .b32 s;"
    low, high = lines
    return f"{{ .reg .b32 x; {declare}\n{low} mov.b32 {{$0, $1}}, x;\n{high} mov.b32 {{$2, $3}}, x;\n}}"


@gluon.jit
def _decode(b_word, DECODE: gl.constexpr):
    """FP16 numbers of int32 words ``[N, W]``: ``[N, 4 W]``; FP16 passes through."""
    if DECODE is None:
        return b_word
    else:
        b0, b1, b2, b3 = gl.inline_asm_elementwise(
            DECODE, "=h,=h,=h,=h,r", [b_word], dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True, pack=1,
        )  # fmt: skip
        b_value = gl.join(gl.join(b0, b2), gl.join(b1, b3))  # [N, W, upper, odd]
        return gl.reshape(b_value, [b_word.shape[0], 4 * b_word.shape[1]])


@gluon.constexpr_function
def _query_layout(members: int, dim: int, k_width: int) -> gl.SharedLinearLayout:
    """Shared memory of Q ``[members, dim]`` in the order in which lanes read operands of the instruction.

    The four registers that a lane gives to one instruction are 16 bytes, the lanes of a warp follow each
    other: one load brings a whole operand, without bank conflicts, to where the instruction takes it.
    """
    quad = [
        (0, 1),
        (8, 0),
        (0, 4 * k_width),
    ]  # a pair of values; eight rows further; the second half of the sum
    lanes = [(0, k_width), (0, 2 * k_width), (1, 0), (2, 0), (4, 0)]
    steps = [(0, 2**bit) for bit in range(1, k_width.bit_length() - 1)]
    repeats = [(0, 2**bit) for bit in range((8 * k_width).bit_length() - 1, dim.bit_length() - 1)]
    repeats += [(2**bit, 0) for bit in range(4, members.bit_length() - 1)]
    return gl.SharedLinearLayout([list(basis) for basis in quad + lanes + steps + repeats])


@gluon.constexpr_function
def _ring_layout(row_bytes: int, unit_bytes: int, run_bytes: int, rows_apart: int) -> gl.SwizzledSharedLayout:
    """Shared memory of a tile ``[tokens, units]`` from which lanes read runs of rows ``rows_apart`` tokens apart.

    Their banks would be the same: exclusive or with the row's number moves the runs into different parts of
    the 128 bytes that all banks hold.
    """
    phases = min(128, row_bytes) // run_bytes
    return gl.SwizzledSharedLayout(
        run_bytes // unit_bytes, max(rows_apart, 128 // row_bytes), max(1, phases), [1, 0]
    )


@gluon.constexpr_function
def _value_layout(tokens: int, run: int, warps: int) -> gl.DistributedLinearLayout:
    """Registers of a tile ``[tokens, 8 * warps * run units]`` of V.

    Lanes of a quad hold a block of four tokens each, the eight quads adjacent runs of units.
    """
    registers = [(0, 2**bit) for bit in range(run.bit_length() - 1)] + [(1, 0), (2, 0)]
    registers += [(2**bit, 0) for bit in range(4, tokens.bit_length() - 1)]
    lanes = [(4, 0), (8, 0), (0, run), (0, 2 * run), (0, 4 * run)]
    slices = [(0, 8 * run * 2**bit) for bit in range(warps.bit_length() - 1)]
    shape = [tokens, 8 * warps * run]
    return gl.DistributedLinearLayout(
        *([list(b) for b in bases] for bases in (registers, lanes, slices, [])), shape
    )


@gluon.constexpr_function
def _copy_layout(
    tokens: int, units: int, wide: int, warps: int, by_block: bool
) -> gl.DistributedLinearLayout:
    """Which thread copies what of a tile ``[tokens, units]``, ``wide`` units (16 bytes) at a time.

    Lanes take a token's units, then tokens; so do warps, then registers. With ``by_block`` the same for one
    entry per token ``[tokens / 4, 4]``, which all lanes of the token hold.
    """
    chunks, levels = units // wide, (tokens.bit_length() - 1)
    token_lanes, token_warps = 5 - (chunks.bit_length() - 1), warps.bit_length() - 1
    order = [(2**bit // 4, 0) if by_block and bit > 1 else (0, 2**bit) if by_block else (2**bit, 0)
             for bit in range(levels)]  # fmt: skip
    lanes = [(0, 0 if by_block else wide * 2**bit) for bit in range(5 - token_lanes)] + order[:token_lanes]
    in_warps = order[token_lanes : token_lanes + token_warps]
    registers = [] if by_block else [(0, 2**bit) for bit in range(wide.bit_length() - 1)]
    registers += order[token_lanes + token_warps :]
    in_warps += [(0, 0)] * (token_warps - len(in_warps))
    shape = [tokens // 4, 4] if by_block else [tokens, units]
    return gl.DistributedLinearLayout(
        *([list(basis) for basis in bases] for bases in (registers, lanes, in_warps, [])), shape
    )


@gluon.jit
def _per_token(s_list, COPY: gl.constexpr, ENTRIES: gl.constexpr):
    """A list per block in shared memory as one entry per token, in the threads that copy the token."""
    b_entry = s_list.load(gl.SliceLayout(1, ENTRIES))[:, None]
    b_entry, _ = gl.broadcast(b_entry, gl.full([s_list.shape[0], 4], 0, gl.int32, ENTRIES))
    return gl.convert_layout(
        gl.reshape(b_entry, [4 * s_list.shape[0]]), gl.SliceLayout(1, COPY), assert_trivial=True
    )


@gluon.jit
def _fetch_tiles(p_k, p_v, s_k, s_v, s_block, s_seen, turn, WARPS: gl.constexpr):
    """Start to copy a turn's K and V as stored, ``[tokens, units]`` each; 0 where no row sees the token."""
    TOKENS: gl.constexpr = s_k.shape[0]
    UNITS: gl.constexpr = s_k.shape[1]
    WIDE: gl.constexpr = 128 // p_k.dtype.element_ty.primitive_bitwidth
    COPY: gl.constexpr = _copy_layout(TOKENS, UNITS, WIDE, WARPS, False)
    ENTRIES: gl.constexpr = _copy_layout(TOKENS, UNITS, WIDE, WARPS, True)
    o_token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, COPY)) % 4
    o_unit = gl.arange(0, UNITS, layout=gl.SliceLayout(0, COPY))
    b_block = _per_token(s_block.index(turn), COPY, ENTRIES)  # physical blocks
    b_seen = _per_token(s_seen.index(turn), COPY, ENTRIES)  # bit 4 m + t: row m sees token t
    o_tile = ((b_block.to(gl.int64) * 4 + o_token) * UNITS)[:, None] + o_unit[None, :]
    m_tile = (((b_seen >> o_token) & 0x11111111) != 0)[:, None]
    async_copy.async_copy_global_to_shared(s_k, p_k + o_tile, mask=m_tile)
    async_copy.async_copy_global_to_shared(s_v, p_v + o_tile, mask=m_tile)


@gluon.jit
def page4_attention_gluon_kernel(
    p_q, stride_q_row, stride_q_head, p_k, p_v,
    p_tables, stride_table, p_blocks, p_masks, capacity,
    p_counts, p_group_request, p_group_start, p_group_rows,
    p_gate, stride_gate_row, stride_gate_head, p_out, p_lse, score_factor, v_factor,
    DECODE: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    SPLITS: gl.constexpr, TURNS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One program attends all rows of a group and all query heads of a KV head over its share of the tokens.

    Arguments as in the plain kernel; pages of byte formats are int32 words. A turn is ``BN`` tokens, and a
    split lists at most ``TURNS`` turns, the ``STAGES - 1`` empty ones after its last included.
    """
    i_group, i_head, i_split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: gl.constexpr = HQ // HKV
    BLOCKS: gl.constexpr = BN // 4
    UNIT_BYTES: gl.constexpr = p_k.dtype.element_ty.primitive_bitwidth // 8
    PACKED: gl.constexpr = 4 if DECODE is not None else 1  # values of a stored unit
    UNITS: gl.constexpr = D // PACKED  # of a token
    WIDE: gl.constexpr = 16 // UNIT_BYTES  # units of the widest load
    # Values of a lane that lie together: up to 16 bytes of K; what a warp's eight columns leave of V.
    K_WIDTH: gl.constexpr = min(WIDE * PACKED, D // 8)
    V_WIDTH: gl.constexpr = D // (8 * WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    # Lanes of a quad hold parts of one token, the eight quads the tokens of two blocks.
    K_LOAD: gl.constexpr = gl.BlockedLayout([1, K_WIDTH // PACKED], [8, 4], [WARPS, 1], [1, 0])
    V_LOAD: gl.constexpr = _value_layout(BN, V_WIDTH // PACKED, WARPS)
    K_RING: gl.constexpr = _ring_layout(UNITS * UNIT_BYTES, UNIT_BYTES, 4 * K_WIDTH // PACKED * UNIT_BYTES, 1)
    V_RING: gl.constexpr = _ring_layout(UNITS * UNIT_BYTES, UNIT_BYTES, 32, 4)

    # The split's blocks, physical, and who sees them. Turns past the end see nothing, nor does a padding
    # group. Entries are loaded before their count is known: those beyond it lie in the list, and mean nothing.
    rows = gl.load(p_group_rows + i_group)
    count = gl.load(p_counts + i_group)
    request = gl.load(p_group_request + i_group)
    first_row = gl.load(p_group_start + i_group)
    s_block = gl.allocate_shared_memory(gl.int32, [TURNS, BLOCKS], PLAIN)
    s_seen = gl.allocate_shared_memory(gl.int32, [TURNS, BLOCKS], PLAIN)
    LISTED: gl.constexpr = min(TURNS * BLOCKS, 128 * WARPS)
    s_block_list = s_block._reinterpret(gl.int32, [TURNS * BLOCKS // LISTED, LISTED], PLAIN)
    s_seen_list = s_seen._reinterpret(gl.int32, [TURNS * BLOCKS // LISTED, LISTED], PLAIN)
    o_listed = gl.arange(0, LISTED, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    o_list = i_group.to(gl.int64) * capacity
    for step in gl.static_range(TURNS * BLOCKS // LISTED):
        o_entry = step * LISTED + o_listed
        o_entry = (o_entry // BLOCKS * SPLITS + i_split) * BLOCKS + o_entry % BLOCKS
        b_mask = gl.load(p_masks + o_list + o_entry, mask=o_entry < capacity, other=0)
        b_listed = gl.load(p_blocks + o_list + o_entry, mask=o_entry < capacity, other=0)
        m_entry = (o_entry < count) & (b_mask != 0) & (rows > 0)
        p_table = p_tables + request.to(gl.int64) * stride_table
        b_page = gl.load(p_table + b_listed // 4, mask=m_entry, other=0)
        s_seen_list.index(step).store(gl.where(m_entry, b_mask, 0))
        s_block_list.index(step).store((b_page.to(gl.int32) * HKV + i_head) * 4 + b_listed % 4)
    count = gl.where(rows > 0, count, 0)
    turns = gl.cdiv(gl.maximum(gl.cdiv(count, BLOCKS) - i_split, 0), SPLITS)

    s_k = gl.allocate_shared_memory(p_k.dtype.element_ty, [STAGES, BN, UNITS], K_RING)
    s_v = gl.allocate_shared_memory(p_k.dtype.element_ty, [STAGES, BN, UNITS], V_RING)
    for turn in gl.static_range(STAGES - 1):
        _fetch_tiles(p_k, p_v, s_k.index(turn), s_v.index(turn), s_block, s_seen, turn, WARPS)
        async_copy.commit_group()

    Q_LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    o_member = gl.arange(0, BM, layout=gl.SliceLayout(1, Q_LOAD))
    o_dim = gl.arange(0, D, layout=gl.SliceLayout(0, Q_LOAD))
    o_q = (first_row + o_member // GROUP).to(gl.int64) * stride_q_row
    o_q += (i_head * GROUP + o_member % GROUP) * stride_q_head
    m_q = o_member // GROUP < gl.minimum(rows, ROWS)
    b_q = gl.load(p_q + o_q[:, None] + o_dim[None, :], mask=m_q[:, None], other=0.0)
    s_q = gl.allocate_shared_memory(gl.float16, [BM, D], _query_layout(BM, D, K_WIDTH))
    s_q.store(b_q)

    o_member = gl.arange(0, BM, layout=ROW)
    m_member = o_member // GROUP < gl.minimum(rows, ROWS)  # [BM]
    o_bit = gl.where(m_member, o_member // GROUP * 4, 0)
    # Mask words where the columns of S are: [rows (wrapped), block, token / 2, token % 2].
    SEEN: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2], [8, 2, 2, 1], [1, WARPS, 1, 1], [3, 2, 1, 0])
    o_high = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, SEEN))))
    o_low = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, SEEN))))
    o_seen = o_high[None, None, :, None] * 2 + o_low[None, None, None, :]

    b_max = gl.full([BM], -float("inf"), gl.float32, layout=ROW)
    b_sum = gl.full([BM, BN], 0.0, gl.float32, layout=MMA)  # summed over columns once, at the end
    b_acc = gl.full([BM, D], 0.0, gl.float32, layout=MMA)
    for turn in range(0, turns):
        stage = turn % STAGES
        async_copy.wait_group(STAGES - 2)
        b_kt = gl.permute(_decode(s_k.index(stage).load(K_LOAD), DECODE), [1, 0])
        b_s = mma_v2(
            s_q.load(gl.DotOperandLayout(0, MMA, K_WIDTH)),
            gl.convert_layout(b_kt, gl.DotOperandLayout(1, MMA, K_WIDTH)),
            gl.full([BM, BN], 0.0, gl.float32, layout=MMA),
        )

        b_seen = s_seen.index(turn).load(gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, SEEN))))
        b_seen = gl.reshape(b_seen[None, :, None, None] >> o_seen, [BN])
        b_seen = gl.convert_layout(b_seen, gl.SliceLayout(0, MMA))
        m_s = m_member[:, None] & (((b_seen[None, :] >> o_bit[:, None]) & 1) != 0)  # [BM, BN]
        b_s = gl.where(m_s, b_s * score_factor, -float("inf"))
        b_new_max = gl.maximum(b_max, gl.max(b_s, axis=1))
        # All warps have met to find the maximum, so the last turn's tiles are free.
        ahead = turn + STAGES - 1
        free = ahead % STAGES
        _fetch_tiles(p_k, p_v, s_k.index(free), s_v.index(free), s_block, s_seen, ahead, WARPS)
        async_copy.commit_group()
        # While a row has seen nothing its maximum is -inf; subtracting 0 gives weights of 0 and not NaN.
        b_shift = gl.where(b_new_max == -float("inf"), 0.0, b_new_max)
        b_p = gl.exp2(b_s - b_shift[:, None])
        b_alpha = gl.exp2(b_max - b_shift)
        b_max = b_new_max
        b_sum = b_sum * b_alpha[:, None] + b_p

        # Column (tile of 8 per warp and repeat, column in it) of O is dimension (warp, column, repeat).
        b_v = _decode(s_v.index(stage).load(V_LOAD), DECODE)
        b_vt = gl.permute(gl.reshape(b_v, [BN, WARPS, 8, V_WIDTH]), [0, 3, 1, 2])
        b_acc = mma_v2(
            gl.convert_layout(b_p.to(gl.float16), gl.DotOperandLayout(0, MMA, 4)),
            gl.convert_layout(gl.reshape(b_vt, [BN, D]), gl.DotOperandLayout(1, MMA, 4)),
            b_acc * b_alpha[:, None],
        )

    b_total = gl.sum(b_sum, axis=1)
    m_live = b_total > 0.0
    b_total = gl.where(m_live, b_total, 1.0)
    b_lse = gl.where(m_live, b_max + gl.log2(b_total), -float("inf"))
    b_acc = b_acc * (1.0 / b_total)[:, None]
    if SPLITS == 1:
        o_out = (first_row + o_member // GROUP).to(gl.int64) * HQ + i_head * GROUP + o_member % GROUP
        gl.store(p_lse + o_out, b_lse * _LN2, mask=m_member)
    else:
        o_out = ((i_group.to(gl.int64) * SPLITS + i_split) * HKV + i_head) * (ROWS * GROUP) + o_member
        gl.store(p_lse + o_out, b_lse, mask=m_member)

    OUT: gl.constexpr = gl.BlockedLayout([1, 2 * V_WIDTH], [8, 4], [1, WARPS], [1, 0])
    b_out = gl.permute(gl.reshape(b_acc, [BM, V_WIDTH, WARPS, 8]), [0, 2, 3, 1])
    b_out = gl.convert_layout(gl.reshape(b_out, [BM, D]), OUT)
    o_dim = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))[None, :]
    o_member = gl.arange(0, BM, layout=gl.SliceLayout(1, OUT))[:, None]
    m_out = o_member // GROUP < gl.minimum(rows, ROWS)
    if SPLITS == 1:
        o_row = (first_row + o_member // GROUP).to(gl.int64)
        o_head = i_head * GROUP + o_member % GROUP
        b_out = b_out * v_factor
        if p_gate is not None:
            # A row without tokens is 0, whatever its gate holds.
            m_gate = m_out & gl.convert_layout(m_live, gl.SliceLayout(1, OUT))[:, None]
            b_gate = gl.load(
                p_gate + o_row * stride_gate_row + o_head * stride_gate_head + o_dim, mask=m_gate, other=0.0
            )
            b_out = gl.where(
                m_gate, b_out / (1.0 + gl.exp2(b_gate.to(gl.float32) * -1.4426950408889634)), 0.0
            )
        p_write = p_out + (o_row * HQ + o_head) * D + o_dim
    else:
        part = ((i_group.to(gl.int64) * SPLITS + i_split) * HKV + i_head) * (ROWS * GROUP)
        p_write = p_out + (part + o_member) * D + o_dim
    gl.store(p_write, b_out.to(p_out.dtype.element_ty), mask=m_out)


@dataclass(frozen=True)
class GluonConfig:
    """How a call is cut into programs.

    Attributes:
        splits: programs that share the tokens of one group and KV head, 1..64.
        tile_tokens: tokens of a turn, a power of two, at least 32 and 8 per warp.
        num_warps: a power of two; each warp owns ``D / num_warps >= 32`` dimensions of the output.
        num_stages: turns in shared memory at once, 2..8: one that is computed, the others on their way.
    """

    splits: int
    tile_tokens: int
    num_warps: int
    num_stages: int = 2

    def check(self, head_dim: int) -> None:
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


def default_gluon_config(inputs: AttentionInputs, multiprocessors: int) -> GluonConfig:
    """A configuration that compiles without spills at up to 64 members of a group."""
    wide = padded_members(inputs) > 32
    num_warps = min(8 if wide else 4, inputs.head_dim // 32)
    tile_tokens = 64 if num_warps == 8 or (num_warps == 4 and inputs.kv_format != "fp16") else 32
    tokens = inputs.plan.blocks.shape[1] * BLOCK_TOKENS
    return GluonConfig(
        splits=default_splits(inputs.groups * inputs.kv_heads, tokens, tile_tokens, multiprocessors),
        tile_tokens=tile_tokens,
        num_warps=num_warps,
    )


def listed_turns(capacity: int, config: GluonConfig) -> int:
    """Turns that a split has room for in shared memory: its most, those fetched past its end, whole loads."""
    blocks = config.tile_tokens // BLOCK_TOKENS
    needed = triton.cdiv(triton.cdiv(capacity, blocks), config.splits) + config.num_stages - 1
    at_once = 128 * config.num_warps // blocks  # four blocks per thread
    return triton.next_power_of_2(needed) if needed <= at_once else triton.cdiv(needed, at_once) * at_once


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
    config.check(inputs.head_dim)
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
    page4_attention_gluon_kernel[(inputs.groups, inputs.kv_heads, config.splits)](
        q, q.stride(0), q.stride(1), k_pages, v_pages,
        inputs.block_tables, inputs.block_tables.stride(0),
        plan.blocks, plan.masks, plan.blocks.shape[1],
        plan.counts, plan.group_request, plan.group_start, plan.group_rows,
        inputs.gate, *inputs.gate_strides, out, lse,
        inputs.softmax_scale * inputs.k_scale * unit * math.log2(math.e), inputs.v_scale * unit,
        DECODE=decode_assembly(inputs.kv_format, native), HQ=q.shape[1], HKV=inputs.kv_heads,
        D=inputs.head_dim, ROWS=inputs.rows_per_group, SPLITS=config.splits,
        TURNS=listed_turns(plan.blocks.shape[1], config), BM=padded_members(inputs), BN=config.tile_tokens,
        STAGES=config.num_stages, WARPS=config.num_warps, DEPENDENT=dependent,
        num_warps=config.num_warps, launch_pdl=dependent,
    )  # fmt: skip
