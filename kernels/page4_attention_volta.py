"""Grouped attention in Gluon on ``mma.m8n8k4``, the tensor-core instruction of compute capability 7.0.

The contract of :mod:`page4.kernels.page4_attention_triton`; :mod:`page4.kernels.volta_tiles` says how
operands lie in registers. Volta copies nothing asynchronously, so there is no ring in shared memory: each
lane loads from global memory the very bytes that it multiplies, and decodes them in registers. Members (a row
of the group with a query head) are the instruction's rows, in tiles of eight.

- ``S = Q K^T``. Each warp owns two blocks of a *set*. The four quad-pairs of a warp take a quarter of the
  dimensions each, so that a token is read in pieces of 64 bytes; shuffles add the four sums.
- ``O = P V``. Each warp owns a slice of the head's dimensions, of all tokens.
- The softmax between them passes maxima and P through shared memory: reductions between warps are wrong in
  Triton 3.6 where a layout has copies on lanes in the middle.

K of the next turn is on its way from the first product of a turn on, V from the turn's beginning.

With a scale per token (int8), a weight is the softmax's times the token's scale of V, both in the exponent:
``w_t = 2^(s_t + log2 v_t - m)`` with m the maximum of ``s_t + log2 v_t``. So FP16 keeps weights as precise as
what they contribute, whatever the range of scales, and codes are exact. The softmax's sum is that of
``w_t / v_t``; shift and all, its quotient with the output is the same.
"""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment"
# ruff: noqa: RUF005, B007 (Triton compiles neither unpacking in tuples nor loops over `_`)

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from page4.kernels.gluon_tiles import list_blocks, load_queries, open_group, write_lse, write_out
from page4.kernels.volta_tiles import (
    as_fragment,
    decode_pairs,
    for_members,
    fragment_layout,
    gather_output,
    gather_scores,
    half_key_fragment,
    halves,
    load_keys,
    load_token_scales,
    load_values,
    maximum_of_warps,
    multiply_column_pairs,
    multiply_columns,
    multiply_rows,
    query_fragment,
    query_layout,
    scores_layout,
    seen_of_tokens,
    sum_of_warps,
    warp_maximum,
    warp_sum,
    weight_fragment,
    weights_layout,
)


@gluon.jit
def _load_turn_keys(p_k, s_block, s_seen, turn, UNITS: gl.constexpr, SETS: gl.constexpr):
    """K of a turn's sets, one after the other."""
    words = ()
    for i in gl.static_range(SETS):
        i_set = turn * SETS + i
        words = words + load_keys(p_k, s_block.index(i_set), s_seen.index(i_set), UNITS)
    return words


@gluon.jit
def _load_turn_scales(p_k_scales, p_v_scales, s_block, s_seen, turn, SETS: gl.constexpr):
    """Scales of K and of V of a turn's sets, one pair after the other; nothing where a format has none."""
    scales = ()
    if p_k_scales is not None:
        for i in gl.static_range(SETS):
            i_set = turn * SETS + i
            scales = scales + (
                load_token_scales(p_k_scales, s_block.index(i_set), s_seen.index(i_set)),
                load_token_scales(p_v_scales, s_block.index(i_set), s_seen.index(i_set)),
            )
    return scales


@gluon.jit
def _load_turn_values(p_v, s_block, s_seen, turn, UNITS: gl.constexpr, QUADS: gl.constexpr):
    """V of a turn, four blocks a tensor."""
    words = ()
    for i in gl.static_range(QUADS):
        i_quad = turn * QUADS + i
        words = words + (load_values(p_v, s_block.index(i_quad), s_seen.index(i_quad), UNITS),)
    return words


@gluon.jit
def _key_fragment(words, i: gl.constexpr, DECODE: gl.constexpr):
    """The right operand for the ``i``-th 16 numbers of every lane."""
    if DECODE is None:
        return half_key_fragment(words, i)
    else:
        return as_fragment(decode_pairs(words[i], DECODE))


@gluon.jit
def _score(s_q, words, i_set: gl.constexpr, DECODE: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr):
    """Scores of a set without their factor: ``[8, 8 * warps]`` per tile of members."""
    WARPS: gl.constexpr = gl.num_warps()
    b_zero = gl.full([32 * WARPS, 8], 0.0, gl.float32, layout=fragment_layout(WARPS))
    sums = (b_zero,) * TILES
    for part in gl.static_range(D // 64):
        b_key = _key_fragment(words, i_set * (D // 64) + part, DECODE)
        added = ()
        for tile in gl.static_range(TILES):
            added = added + (multiply_rows(query_fragment(s_q, tile, part, D), b_key, sums[tile]),)
        sums = added
    return sums


@gluon.jit
def _masked(scores, b_seen, row_bits, factor, b_added):
    """Scores of a set for every tile: times a factor, plus what is added; -inf where unseen by the member."""
    masked = ()
    for tile in gl.static_range(len(row_bits)):
        m_seen = (b_seen[None, :] & row_bits[tile][:, None]) != 0
        b_score = gather_scores(scores[tile]) * factor
        if b_added is not None:
            b_score += b_added[None, :]
        masked = masked + (gl.where(m_seen, b_score, -float("inf")),)
    return masked


@gluon.jit
def _score_turn(s_q, words, DECODE: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr, SETS: gl.constexpr):
    """:func:`_score` of every set."""
    scores = ()
    for i_set in gl.static_range(SETS):
        scores = scores + _score(s_q, words, i_set, DECODE, D, TILES)
    return scores


@gluon.jit
def _value_scale(b_scale):
    """Scales of V that have a finite inverse and logarithm; NaN becomes a number."""
    return gl.maximum(b_scale, 2.0**-100)  # below it are tokens whose codes are 0, and no FP16 numbers


@gluon.jit
def _mask_turn(sums, scales, s_seen, turn, row_bits, score_factor, SETS: gl.constexpr):
    """:func:`_masked` of every set, with the tokens' scales where there are any."""
    TILES: gl.constexpr = len(row_bits)
    scores = ()
    for i in gl.static_range(SETS):
        b_seen = seen_of_tokens(s_seen.index(turn * SETS + i))
        set_sums = sums[i * TILES : (i + 1) * TILES]
        if len(scales) == 0:
            scores = scores + _masked(set_sums, b_seen, row_bits, score_factor, None)
        else:
            b_scale = scales[2 * i + 1]
            # A NaN reaches the rows that see it, and no others.
            b_log = gl.where(b_scale == b_scale, gl.log2(_value_scale(b_scale)), b_scale)
            b_factor = (scales[2 * i] * score_factor)[None, :]
            scores = scores + _masked(set_sums, b_seen, row_bits, b_factor, b_log)
    return scores


@gluon.jit
def _inverse_scales(scales):
    """What a token's weight is multiplied with in the softmax's sum, of every set."""
    inverses = ()
    for i in gl.static_range(len(scales) // 2):
        inverses = inverses + (1.0 / _value_scale(scales[2 * i + 1]),)
    return inverses


@gluon.jit
def _leave_maxima(scores, s_warps):
    """Every warp's maxima over the turn's sets, to where all find them."""
    TILES: gl.constexpr = len(s_warps)
    for tile in gl.static_range(TILES):
        b_score = scores[tile]
        for i in gl.static_range(1, len(scores) // TILES):
            b_score = gl.maximum(b_score, scores[i * TILES + tile])
        s_warps[tile].store(warp_maximum(b_score))


@gluon.jit
def _new_maxima(s_warps, maxima):
    found = ()
    for tile in gl.static_range(len(s_warps)):
        found = found + (gl.maximum(maximum_of_warps(s_warps[tile]), maxima[tile]),)
    return found


@gluon.jit
def _shifts(maxima):
    """What is subtracted from scores: 0 while a member has seen nothing, so that weights are 0, not NaN."""
    shifts = ()
    for tile in gl.static_range(len(maxima)):
        shifts = shifts + (gl.where(maxima[tile] == -float("inf"), 0.0, maxima[tile]),)
    return shifts


@gluon.jit
def _leave_weights(scores, shifts, inverses, s_weights):
    """Weights of all sets and tiles, to where all warps find them; and the softmax's sums over the sets."""
    TILES: gl.constexpr = len(shifts)
    sums = ()
    for tile in gl.static_range(TILES):
        b_sum = None
        for i in gl.static_range(len(scores) // TILES):
            b_weight = gl.exp2(scores[i * TILES + tile] - shifts[tile][:, None])
            s_weights[i * TILES + tile].store(b_weight.to(gl.float16))
            if len(inverses) > 0:
                b_weight *= inverses[i][None, :]
            b_sum = b_weight if b_sum is None else b_sum + b_weight
        sums = sums + (b_sum,)
    return sums


@gluon.jit
def _alphas(maxima, shifts):
    """What sums until now are worth."""
    alphas = ()
    for tile in gl.static_range(len(maxima)):
        alphas = alphas + (gl.exp2(maxima[tile] - shifts[tile]),)
    return alphas


@gluon.jit
def _added_sums(sums, alphas, added):
    result = ()
    for tile in gl.static_range(len(sums)):
        result = result + (sums[tile] * alphas[tile][:, None] + added[tile],)
    return result


@gluon.jit
def _scaled(outputs, factors):
    """Sums of O, ``RUNS`` fragments a tile, times a factor per member."""
    TILES: gl.constexpr = len(factors)
    scaled = ()
    for tile in gl.static_range(TILES):
        b_factor = for_members(factors[tile])
        for i in gl.static_range(len(outputs) // TILES):
            scaled = scaled + (outputs[tile * (len(outputs) // TILES) + i] * b_factor,)
    return scaled


@gluon.jit
def _attend(outputs, words, s_weights, TILES: gl.constexpr, DECODE: gl.constexpr):
    """Sums of O plus weights times V, four blocks at a time."""
    RUNS: gl.constexpr = len(outputs) // TILES
    SETS: gl.constexpr = len(s_weights) // TILES
    QUADS: gl.constexpr = len(words) // SETS  # of a set
    for i_set in gl.static_range(SETS):
        for quad in gl.static_range(QUADS):
            b_value = decode_pairs(words[i_set * QUADS + quad], DECODE)
            added = ()
            for tile in gl.static_range(TILES):
                b_weight = weight_fragment(s_weights[i_set * TILES + tile], quad)
                if RUNS == 1:
                    added = added + (multiply_columns(b_weight, as_fragment(b_value), outputs[tile]),)
                else:
                    b_first, b_last = halves(b_value)
                    b_sum, b_other = multiply_column_pairs(
                        b_weight, as_fragment(b_first), as_fragment(b_last),
                        outputs[2 * tile], outputs[2 * tile + 1],
                    )  # fmt: skip
                    added = added + (b_sum, b_other)
            outputs = added
    return outputs


@gluon.jit
def page4_attention_volta_kernel(
    p_q, stride_q_row, stride_q_head, p_k, p_v,
    p_tables, stride_table, p_blocks, p_masks, capacity,
    p_counts, p_group_request, p_group_start, p_group_rows,
    p_gate, stride_gate_row, stride_gate_head, p_out, p_lse, score_factor, v_factor,
    p_k_token_scales, p_v_token_scales,
    DECODE: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, SPLITS: gl.constexpr, TURNS: gl.constexpr, TILES: gl.constexpr, BN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """One program attends a group's rows and a ``PARTS``-th of a KV head's query heads to its tokens.

    Arguments as in the plain kernel; pages of all formats are int32 words, and int8 alone has scales of
    tokens. ``TILES`` times eight members have room. A turn is ``BN`` tokens, and a split lists at most
    ``TURNS`` turns, the empty one after its last included.
    """
    i_group, i_head, i_split = gl.program_id(0), gl.program_id(1) // PARTS, gl.program_id(2)
    HEADS: gl.constexpr = HQ // (HKV * PARTS)
    first_head = gl.program_id(1) * HEADS
    UNITS: gl.constexpr = D // (4 if DECODE is not None else 2)  # words of a token
    RUNS: gl.constexpr = D // (32 * WARPS)  # fragments of O a tile
    SETS: gl.constexpr = BN // (8 * WARPS)
    QUADS: gl.constexpr = BN // 16
    BM: gl.constexpr = 8 * triton.next_power_of_2(TILES)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FRAGMENT: gl.constexpr = fragment_layout(WARPS)
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [max(1, 128 // D), min(32, D // 4)], [WARPS, 1], [1, 0])
    SCORES: gl.constexpr = scores_layout(WARPS)
    MEMBER: gl.constexpr = gl.SliceLayout(1, SCORES)

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
    s_set_block = s_block._reinterpret(gl.int32, [TURNS * SETS, 2 * WARPS], PLAIN)
    s_set_seen = s_seen._reinterpret(gl.int32, [TURNS * SETS, 2 * WARPS], PLAIN)
    s_quad_block = s_block._reinterpret(gl.int32, [TURNS * QUADS, 4], PLAIN)
    s_quad_seen = s_seen._reinterpret(gl.int32, [TURNS * QUADS, 4], PLAIN)
    keys = _load_turn_keys(p_k, s_set_block, s_set_seen, 0, UNITS, SETS)
    scales = _load_turn_scales(p_k_token_scales, p_v_token_scales, s_set_block, s_set_seen, 0, SETS)

    s_q = gl.allocate_shared_memory(gl.float16, [BM, D], query_layout(BM, D, 8 if DECODE is None else 16))
    s_q.store(b_q)
    # Of every tile its own: stores to parts of one allocation would each wait for a barrier.
    s_warps = ()
    row_bits = ()
    maxima = ()
    for tile in gl.static_range(TILES):
        s_warps = s_warps + (
            gl.allocate_shared_memory(gl.float32, [8, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        )
        o_member = 8 * tile + gl.arange(0, 8, layout=MEMBER)
        m_member = o_member // HEADS < gl.minimum(rows, ROWS)
        row_bits = row_bits + (gl.where(m_member, 1 << gl.where(m_member, o_member // HEADS * 4, 0), 0),)
        maxima = maxima + (gl.full([8], -float("inf"), gl.float32, layout=MEMBER),)
    s_weights = ()
    for i in gl.static_range(SETS * TILES):
        s_weights = s_weights + (
            gl.allocate_shared_memory(gl.float16, [8, 8 * WARPS], weights_layout(8 * WARPS)),
        )
    sums = (gl.full([8, 8 * WARPS], 0.0, gl.float32, layout=SCORES),) * TILES
    outputs = (gl.full([32 * WARPS, 8], 0.0, gl.float32, layout=FRAGMENT),) * (TILES * RUNS)
    for turn in range(0, turns):
        values = _load_turn_values(p_v, s_quad_block, s_quad_seen, turn, UNITS, QUADS)
        raw = _score_turn(s_q, keys, DECODE, D, TILES, SETS)
        keys = _load_turn_keys(p_k, s_set_block, s_set_seen, turn + 1, UNITS, SETS)
        scores = _mask_turn(raw, scales, s_set_seen, turn, row_bits, score_factor, SETS)
        inverses = _inverse_scales(scales)
        scales = _load_turn_scales(
            p_k_token_scales, p_v_token_scales, s_set_block, s_set_seen, turn + 1, SETS
        )
        _leave_maxima(scores, s_warps)
        found = _new_maxima(s_warps, maxima)
        shifts = _shifts(found)
        added = _leave_weights(scores, shifts, inverses, s_weights)
        alphas = _alphas(maxima, shifts)
        maxima = found
        sums = _added_sums(sums, alphas, added)
        outputs = _attend(_scaled(outputs, alphas), values, s_weights, TILES, DECODE)

    for tile in gl.static_range(TILES):
        s_warps[tile].store(warp_sum(sums[tile]))
    # Loaded and computed again, not kept in registers through the loop. No compiler knows that `first` is 0.
    rows, first_row, _, _ = open_group(p_counts, p_group_request, p_group_start, p_group_rows, i_group)
    first = gl.minimum(rows, 0)
    for tile in gl.static_range(TILES):
        o_member = first + 8 * tile + gl.arange(0, 8, layout=MEMBER)
        m_member = o_member // HEADS < gl.minimum(rows, ROWS)
        b_total = sum_of_warps(s_warps[tile])
        m_live = b_total != 0.0  # NaN stays
        b_total = gl.where(m_live, b_total, 1.0)
        b_lse = gl.where(m_live, maxima[tile] + gl.log2(b_total), -float("inf"))
        write_lse(
            b_lse, p_lse, o_member, m_member, first_row, i_group, i_head, i_split, first_head,
            HQ, HKV, ROWS, HEADS, SPLITS,
        )  # fmt: skip
        b_out = gather_output(_scaled(outputs[tile * RUNS : (tile + 1) * RUNS], (1.0 / b_total,)))
        if SPLITS == 1:  # FP16, and so is the gate: four lie together, not two
            b_out = gl.convert_layout(b_out, OUT)
        write_out(
            b_out, m_live, first_row, rows, p_gate, stride_gate_row, stride_gate_head, p_out, v_factor,
            i_group, i_head, i_split, first_head, HQ, HKV, ROWS, HEADS, SPLITS, first + 8 * tile,
        )  # fmt: skip
