"""Grouped attention in Gluon on ``mma.m16n8k16``, the tensor-core instruction from compute capability 8.0 on.

The contract of :mod:`page4.kernels.page4_attention_triton`; :mod:`page4.kernels.gluon_tiles` says how
K and V travel. Rows are the instruction's 16 rows, tokens and dimensions its 8 columns:

- ``S = Q K^T``. Each warp owns whole tokens. A lane holds up to 16 bytes of one token that lie together; Q is
  laid out in shared memory so that the same dimensions meet (``k_width`` of the operand layouts).
- ``O = P V``. Each warp owns a slice of the head's dimensions. Columns of O are numbered so that a lane's
  columns in successive instructions are dimensions that lie together: its loads are as wide as that run.
- The softmax between them passes P through shared memory, as every warp needs all tokens of it.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from page4.kernels.gluon_tiles import (
    decode,
    fetch_tiles,
    list_blocks,
    load_queries,
    open_group,
    ring_layout,
    value_layout,
    write_lse,
    write_out,
)


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


@gluon.jit
def page4_attention_ampere_kernel(
    p_q, stride_q_row, stride_q_head, p_k, p_v,
    p_tables, stride_table, p_blocks, p_masks, capacity,
    p_counts, p_group_request, p_group_start, p_group_rows,
    p_gate, stride_gate_row, stride_gate_head, p_out, p_lse, score_factor, v_factor,
    DECODE: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, SPLITS: gl.constexpr, TURNS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One program attends a group's rows and a ``PARTS``-th of a KV head's query heads to its tokens.

    Arguments as in the plain kernel; pages of byte formats are int32 words. A turn is ``BN`` tokens, and a
    split lists at most ``TURNS`` turns, the ``STAGES - 1`` empty ones after its last included.
    """
    i_group, i_head, i_split = gl.program_id(0), gl.program_id(1) // PARTS, gl.program_id(2)
    if DEPENDENT:
        gdc_wait()
    HEADS: gl.constexpr = HQ // (HKV * PARTS)
    first_head = gl.program_id(1) * HEADS
    UNIT_BYTES: gl.constexpr = p_k.dtype.element_ty.primitive_bitwidth // 8
    PACKED: gl.constexpr = 4 if DECODE is not None else 1  # values of a stored unit
    UNITS: gl.constexpr = D // PACKED  # of a token
    WIDE: gl.constexpr = 16 // UNIT_BYTES  # units of the widest load
    # Values of a lane that lie together: up to 16 bytes of K; what a warp's eight columns leave of V.
    K_WIDTH: gl.constexpr = min(WIDE * PACKED, D // 8)
    V_WIDTH: gl.constexpr = D // (8 * WARPS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    # Lanes of a quad hold parts of one token, the eight quads the tokens of two blocks.
    K_LOAD: gl.constexpr = gl.BlockedLayout([1, K_WIDTH // PACKED], [8, 4], [WARPS, 1], [1, 0])
    V_LOAD: gl.constexpr = value_layout(BN, V_WIDTH // PACKED, 1, WARPS)
    K_RING: gl.constexpr = ring_layout(UNITS * UNIT_BYTES, UNIT_BYTES, 4 * K_WIDTH // PACKED * UNIT_BYTES, 1)
    V_RING: gl.constexpr = ring_layout(UNITS * UNIT_BYTES, UNIT_BYTES, 32, 4)

    rows, first_row, request, count = open_group(
        p_counts, p_group_request, p_group_start, p_group_rows, i_group
    )
    b_q = load_queries(
        p_q, stride_q_row, stride_q_head, first_row, rows, first_head, BM, D, ROWS, HEADS, WARPS
    )
    turns, s_block, s_seen = list_blocks(
        p_tables, stride_table, p_blocks, p_masks, capacity, count, request, i_group, i_head, i_split,
        HKV, SPLITS, TURNS, BN // 4, WARPS,
    )  # fmt: skip

    s_k = gl.allocate_shared_memory(p_k.dtype.element_ty, [STAGES, BN, UNITS], K_RING)
    s_v = gl.allocate_shared_memory(p_k.dtype.element_ty, [STAGES, BN, UNITS], V_RING)
    for turn in gl.static_range(STAGES - 1):
        fetch_tiles(p_k, p_v, s_k.index(turn), s_v.index(turn), s_block, s_seen, turn)

    s_q = gl.allocate_shared_memory(gl.float16, [BM, D], _query_layout(BM, D, K_WIDTH))
    s_q.store(b_q)

    o_member = gl.arange(0, BM, layout=ROW)
    m_member = o_member // HEADS < gl.minimum(rows, ROWS)  # [BM]
    o_bit = gl.where(m_member, o_member // HEADS * 4, 0)
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
        b_kt = gl.permute(decode(s_k.index(stage).load(K_LOAD), DECODE), [1, 0])
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
        fetch_tiles(p_k, p_v, s_k.index(free), s_v.index(free), s_block, s_seen, ahead)
        # While a row has seen nothing its maximum is -inf; subtracting 0 gives weights of 0 and not NaN.
        b_shift = gl.where(b_new_max == -float("inf"), 0.0, b_new_max)
        b_p = gl.exp2(b_s - b_shift[:, None])
        b_alpha = gl.exp2(b_max - b_shift)
        b_max = b_new_max
        b_sum = b_sum * b_alpha[:, None] + b_p

        # Column (tile of 8 per warp and repeat, column in it) of O is dimension (warp, column, repeat).
        b_v = decode(s_v.index(stage).load(V_LOAD), DECODE)
        b_vt = gl.permute(gl.reshape(b_v, [BN, WARPS, 8, V_WIDTH]), [0, 3, 1, 2])
        b_acc = mma_v2(
            gl.convert_layout(b_p.to(gl.float16), gl.DotOperandLayout(0, MMA, 4)),
            gl.convert_layout(gl.reshape(b_vt, [BN, D]), gl.DotOperandLayout(1, MMA, 4)),
            b_acc * b_alpha[:, None],
        )

    b_total = gl.sum(b_sum, axis=1)
    m_live = b_total != 0.0  # NaN stays
    b_total = gl.where(m_live, b_total, 1.0)
    b_lse = gl.where(m_live, b_max + gl.log2(b_total), -float("inf"))
    b_acc = b_acc * (1.0 / b_total)[:, None]
    if DEPENDENT:
        gdc_launch_dependents()
    write_lse(
        b_lse, p_lse, o_member, m_member, first_row, i_group, i_head, i_split, first_head,
        HQ, HKV, ROWS, HEADS, SPLITS,
    )  # fmt: skip

    b_out = gl.permute(gl.reshape(b_acc, [BM, V_WIDTH, WARPS, 8]), [0, 2, 3, 1])
    OUT: gl.constexpr = gl.BlockedLayout([1, 2 * V_WIDTH], [8, 4], [1, WARPS], [1, 0])
    write_out(
        gl.convert_layout(gl.reshape(b_out, [BM, D]), OUT, assert_trivial=True), m_live, first_row, rows,
        p_gate, stride_gate_row, stride_gate_head, p_out, v_factor,
        i_group, i_head, i_split, first_head, HQ, HKV, ROWS, HEADS, SPLITS,
    )  # fmt: skip
