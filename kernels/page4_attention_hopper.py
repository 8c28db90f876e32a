"""Grouped attention in Gluon on ``wgmma``, the tensor-core instruction of compute capability 9.0.

The contract of :mod:`page4.kernels.page4_attention_triton`; :mod:`page4.kernels.gluon_tiles` says how K and V
travel. The instruction multiplies 64 rows in registers with 8 to 256 columns in shared memory, so all is
transposed: K and V, which are many and must be decoded, are the rows, and the few members (a row of the group
with a query head) are the columns.

- ``S^T = K Q^T``. Each warp owns whole tokens. A lane holds up to 16 numbers of one token that lie together;
  Q lies in shared memory with its dimensions in the order in which the instruction then meets them.
- ``O^T = V^T P^T``. Each warp owns a slice of the head's dimensions. A lane holds adjacent dimensions of a
  block of four tokens; the rows of P are in the order of the tokens that meet so.
- Between them P passes through shared memory, as every warp needs all tokens of it.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from page4.kernels.gluon_tiles import (
    decode,
    fetch_tile,
    list_blocks,
    load_queries,
    open_group,
    ring_layout,
    value_layout,
    write_lse,
    write_out,
)


@gluon.constexpr_function
def _key_layout(tokens: int, units: int, run: int, warps: int) -> gl.DistributedLinearLayout:
    """Registers of a tile ``[tokens, units]`` of K: rows of ``wgmma``, a run of units per lane of a quad."""
    registers = [(0, 2**bit) for bit in range(run.bit_length() - 1)]
    registers += [(0, 2**bit) for bit in range((4 * run).bit_length() - 1, units.bit_length() - 1)]
    registers += [(8, 0)] + [
        (2**bit, 0) for bit in range((16 * warps).bit_length() - 1, tokens.bit_length() - 1)
    ]
    lanes = [(0, run), (0, 2 * run), (1, 0), (2, 0), (4, 0)]
    in_warps = [(16 * 2**bit, 0) for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        *([list(basis) for basis in bases] for bases in (registers, lanes, in_warps, [])), [tokens, units]
    )


@gluon.constexpr_function
def _seen_layout(tokens: int, warps: int) -> gl.DistributedLinearLayout:
    """Registers of an entry per token ``[tokens / 4, 4]`` where the rows of ``wgmma`` are."""
    registers = [(2, 0)] + [
        (2**bit // 4, 0) for bit in range((16 * warps).bit_length() - 1, tokens.bit_length() - 1)
    ]
    lanes = [(0, 0), (0, 0), (0, 1), (0, 2), (1, 0)]
    in_warps = [(4 * 2**bit, 0) for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        *([list(basis) for basis in bases] for bases in (registers, lanes, in_warps, [])), [tokens // 4, 4]
    )


@gluon.constexpr_function
def _out_layout(members: int, runs: int, warps: int) -> gl.DistributedLinearLayout:
    """Registers of the output ``[members, 32 * runs * warps]`` as they are: runs of four dimensions."""
    registers = [(0, 1), (0, 2)] + [(0, 32 * 2**bit) for bit in range(runs.bit_length() - 1)] + [(1, 0)]
    registers += [(2**bit, 0) for bit in range(3, members.bit_length() - 1)]
    lanes = [(2, 0), (4, 0), (0, 4), (0, 8), (0, 16)]
    in_warps = [(0, 32 * runs * 2**bit) for bit in range(warps.bit_length() - 1)]
    shape = [members, 32 * runs * warps]
    return gl.DistributedLinearLayout(
        *([list(basis) for basis in bases] for bases in (registers, lanes, in_warps, [])), shape
    )


@gluon.jit
def _in_key_order(x, RUN: gl.constexpr):
    """``[N, D]`` with its dimensions as the instruction meets them when a lane holds ``RUN`` adjacent ones.

    In a step of 16, lane t of a quad gives columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    """
    N: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    x = gl.reshape(x, [N, D // (4 * RUN), 4, RUN // 4, 2, 2])
    return gl.reshape(gl.permute(x, [0, 1, 3, 4, 2, 5]), [N, D])


@gluon.jit
def _sum_of_lane(x):
    """Sums ``[tokens of other lanes and warps, BM]`` of the rows ``[BN, BM]`` that a lane holds."""
    WARPS: gl.constexpr = gl.num_warps()
    BM: gl.constexpr = x.shape[1]
    x = gl.reshape(x, [x.shape[0] // (16 * WARPS), WARPS, 2, 8, BM])
    return gl.reshape(gl.sum(gl.sum(x, axis=2), axis=0), [8 * WARPS, BM])


@gluon.jit
def _once_a_lane(b_member, BN: gl.constexpr, MMA: gl.constexpr):
    """A number per member ``[BM]`` where :func:`_sum_of_lane` of rows has its sums."""
    LANE_ROWS: gl.constexpr = BN // (8 * gl.num_warps())
    b_share = gl.full([BN, b_member.shape[0]], 1.0 / LANE_ROWS, gl.float32, layout=MMA)  # a power of two
    return _sum_of_lane(b_share * b_member[None, :])


@gluon.jit
def page4_attention_hopper_kernel(
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
    K_RUN: gl.constexpr = 16 // UNIT_BYTES * PACKED  # values of a lane that lie together: 16 bytes of K,
    V_RUNS: gl.constexpr = D // (32 * WARPS)  # and of V this many runs of four
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    MEMBER: gl.constexpr = gl.SliceLayout(0, MMA)
    K_PART: gl.constexpr = 64  # dimensions, and
    V_PART: gl.constexpr = 32 if BM * D < 4096 * WARPS else 16  # tokens that are decoded at once
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], gl.float16)
    K_LOAD: gl.constexpr = _key_layout(BN, K_PART // PACKED, K_RUN // PACKED, WARPS)
    V_LOAD: gl.constexpr = value_layout(V_PART, 4 // PACKED, V_RUNS, WARPS)
    K_RING: gl.constexpr = ring_layout(UNITS * UNIT_BYTES, UNIT_BYTES, 64, 1)
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

    # V is needed later in a turn than K: it has one place less, and is fetched one turn later.
    s_k = gl.allocate_shared_memory(p_k.dtype.element_ty, [STAGES, BN, UNITS], K_RING)
    s_v = gl.allocate_shared_memory(p_k.dtype.element_ty, [STAGES - 1, BN, UNITS], V_RING)
    fetch_tile(p_k, s_k.index(0), s_block, s_seen, 0)
    for turn in gl.static_range(STAGES - 2):
        fetch_tile(p_v, s_v.index(turn), s_block, s_seen, turn)
        fetch_tile(p_k, s_k.index(turn + 1), s_block, s_seen, turn + 1)

    s_q = gl.allocate_shared_memory(
        gl.float16, [BM, D], gl.NVMMASharedLayout.get_default_for([BM, D], gl.float16)
    )
    s_q.store(_in_key_order(b_q, K_RUN))
    o_member = gl.arange(0, BM, layout=MEMBER)
    m_member = o_member // HEADS < gl.minimum(rows, ROWS)  # [BM]
    o_bit = gl.where(m_member, o_member // HEADS * 4, 0)
    SEEN: gl.constexpr = _seen_layout(BN, WARPS)
    o_seen = gl.arange(0, 4, layout=gl.SliceLayout(0, SEEN))[None, :]

    b_max = gl.full([BM], -float("inf"), gl.float32, layout=MEMBER)  # of scores without their factor
    # A lane's tokens are summed at once, over the lanes once at the end.
    b_sum = _sum_of_lane(gl.full([BN, BM], 0.0, gl.float32, layout=MMA))
    b_acc = gl.full([D, BM], 0.0, gl.float32, layout=MMA)
    fence_async_shared()
    for turn in range(0, turns):
        async_copy.wait_group(2 * (STAGES - 2))  # this turn's K
        # All warps have met, so what the last turn used is free.
        ahead = turn + STAGES - 2
        fetch_tile(p_v, s_v.index(ahead % (STAGES - 1)), s_block, s_seen, ahead)
        fetch_tile(p_k, s_k.index((ahead + 1) % STAGES), s_block, s_seen, ahead + 1)
        s_keys = s_k.index(turn % STAGES)
        b_s = gl.full([BN, BM], 0.0, gl.float32, layout=MMA)
        # In parts, so that few decoded numbers are in registers: one is decoded while the last is multiplied.
        for part in gl.static_range(D // K_PART):
            b_k = s_keys.slice(part * K_PART // PACKED, K_PART // PACKED, dim=1).load(K_LOAD)
            b_k = _in_key_order(decode(b_k, DECODE), K_RUN)
            b_s = warpgroup_mma(
                gl.convert_layout(b_k, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True),
                s_q.slice(part * K_PART, K_PART, dim=1).permute([1, 0]),
                b_s,
                is_async=True,
            )
            b_s = warpgroup_mma_wait(1 if part + 1 < D // K_PART else 0, deps=[b_s])

        b_seen = s_seen.index(turn).load(gl.SliceLayout(1, SEEN))[:, None] >> o_seen
        b_seen = gl.convert_layout(gl.reshape(b_seen, [BN]), gl.SliceLayout(1, MMA), assert_trivial=True)
        b_s = gl.where(((b_seen[:, None] >> o_bit[None, :]) & 1) != 0, b_s, -float("inf"))  # [BN, BM]
        b_new_max = gl.maximum(b_max, gl.max(b_s, axis=0))
        # While a member has seen nothing its maximum is -inf; subtracting 0 gives weights of 0 and not NaN.
        b_shift = gl.where(b_new_max == -float("inf"), 0.0, b_new_max * score_factor)
        b_p = gl.exp2(b_s * score_factor - b_shift[None, :])
        b_alpha = gl.exp2(b_max * score_factor - b_shift)
        b_max = b_new_max
        b_sum = b_sum * _once_a_lane(b_alpha, BN, MMA) + _sum_of_lane(b_p)
        # A step of 16 tokens meets them as lanes hold them: lane t of a quad block t of four.
        # K of this turn has been read: its place is that of P.
        s_p = s_keys._reinterpret(gl.float16, [BN, BM], P_SHARED)
        b_p = gl.reshape(b_p.to(gl.float16), [BN // 16, 4, 2, 2, BM])
        s_p.store(gl.reshape(gl.permute(b_p, [0, 2, 1, 3, 4]), [BN, BM]))

        fence_async_shared()
        # Row (run, pair, warp, half, quad) of O^T is dimension (warp, run, quad, pair, half).
        async_copy.wait_group(2 * (STAGES - 2) + 1)  # this turn's V
        s_values = s_v.index(turn % (STAGES - 1))
        b_acc = b_acc * b_alpha[None, :]
        for part in gl.static_range(BN // V_PART):
            b_v = s_values.slice(part * V_PART, V_PART, dim=0).load(V_LOAD)
            b_v = gl.reshape(decode(b_v, DECODE), [V_PART // 16, 4, 2, 2, WARPS, V_RUNS, 8, 2, 2])
            b_vt = gl.reshape(gl.permute(b_v, [5, 7, 4, 8, 6, 0, 2, 1, 3]), [D, V_PART])
            b_acc = warpgroup_mma(
                gl.convert_layout(b_vt, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True),
                s_p.slice(part * V_PART, V_PART, dim=0),
                b_acc,
                is_async=True,
            )
            b_acc = warpgroup_mma_wait(1 if part + 1 < BN // V_PART else 0, deps=[b_acc])

    b_total = gl.convert_layout(gl.sum(b_sum, axis=0), MEMBER)
    m_live = b_total != 0.0  # NaN stays
    b_total = gl.where(m_live, b_total, 1.0)
    b_lse = gl.where(m_live, b_max * score_factor + gl.log2(b_total), -float("inf"))
    if DEPENDENT:
        gdc_launch_dependents()
    write_lse(
        b_lse, p_lse, o_member, m_member, first_row, i_group, i_head, i_split, first_head,
        HQ, HKV, ROWS, HEADS, SPLITS,
    )  # fmt: skip
    b_acc = gl.reshape(b_acc * (1.0 / b_total)[None, :], [V_RUNS, 2, WARPS, 2, 8, BM])
    b_acc = gl.reshape(gl.permute(b_acc, [5, 2, 0, 4, 1, 3]), [BM, D])
    write_out(
        gl.convert_layout(b_acc, _out_layout(BM, V_RUNS, WARPS), assert_trivial=True),
        m_live, first_row, rows, p_gate, stride_gate_row, stride_gate_head, p_out, v_factor,
        i_group, i_head, i_split, first_head, HQ, HKV, ROWS, HEADS, SPLITS,
    )  # fmt: skip
