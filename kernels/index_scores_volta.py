"""Index scores in Gluon on ``mma.m8n8k4``, the tensor-core instruction of compute capability 7.0.

The contract of :func:`~page4.kernels.index_scores_triton.index_scores_triton` for FP16 queries and keys;
:mod:`page4.kernels.volta_tiles` says how operands lie in registers. Members (a row of the group with an index
head) are the instruction's rows and stay in registers; keys pass by once, straight from global memory, and
nothing goes through shared memory. Pages are looked up two tiles ahead, keys are loaded one tile ahead.
"""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton compiles no unpacking in tuples)

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from page4.kernels.volta_tiles import (
    MEMBERS,
    as_fragment,
    fragment_layout,
    gather_scores,
    half_key_fragment,
    load_rows,
    multiply_rows,
    scores_layout,
    thread_layout,
)

_MOST_FRAGMENTS = 8  # of queries, 8 registers each


def scores_tiles(heads: int, rows_per_group: int) -> int:
    """Tiles of eight members; the heads of a row are padded to a power of two."""
    return triton.cdiv(rows_per_group * triton.next_power_of_2(heads), MEMBERS)


def volta_can_score(heads: int, dim: int, rows_per_group: int) -> bool:
    """Whether a group's queries have room in registers, in the order that the kernel has for them."""
    parts = dim // 64
    return (
        dim in (64, 128, 256)
        and heads <= 8
        and scores_tiles(heads, rows_per_group) * parts <= _MOST_FRAGMENTS
    )


@gluon.jit
def _queries(
    p_queries, stride_row, stride_head, start, rows, tile: gl.constexpr, part: gl.constexpr,
    HEADS: gl.constexpr, HEADS_PAD: gl.constexpr,
):  # fmt: skip
    """The left operand of a tile's members for the ``part``-th 16 numbers of every lane."""
    WARPS: gl.constexpr = gl.num_warps()
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [WARPS, 1], [1, 0])
    o_thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, LOAD))
    o_number = gl.arange(0, 16, layout=gl.SliceLayout(0, LOAD))[None, :]
    o_member = tile * 8 + o_thread % 4 + o_thread // 16 % 2 * 4
    o_row, o_head = o_member // HEADS_PAD, o_member % HEADS_PAD
    o_query = (start + o_row) * stride_row + o_head * stride_head
    # Two runs of 8 numbers, as the keys of a lane have them.
    o_dim = part * 64 + o_number // 8 * 32 + (o_thread // 4 % 4 * 8)[:, None] + o_number % 8
    m_query = ((o_row < rows) & (o_head < HEADS))[:, None]
    b_query = gl.load(p_queries + o_query[:, None] + o_dim, mask=m_query, other=0.0)
    b_low, b_high = gl.split(gl.reshape(b_query, [32 * WARPS, 8, 2]))
    b_pair = gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [b_low, b_high], dtype=gl.int32, is_pure=True, pack=1
    )
    return as_fragment(b_pair)


@gluon.jit
def _pages(p_table, tile, longest, BN: gl.constexpr, SETS: gl.constexpr):
    """The page that a half warp reads, ``[threads]``, for every set of a tile; 0 past the longest row."""
    WARPS: gl.constexpr = gl.num_warps()
    o_half = gl.arange(0, 32 * WARPS, layout=thread_layout(WARPS)) // 16
    pages = ()
    for i in gl.static_range(SETS):
        o_page = tile * (BN // 4) + i * 2 * WARPS + o_half
        pages = pages + (gl.load(p_table + o_page, mask=o_page * 4 < longest, other=0),)
    return pages


@gluon.jit
def _keys(p_pages, pages, tile, longest, BN: gl.constexpr, UNITS: gl.constexpr):
    """Keys of a tile as stored, of all sets; 0 past the longest row."""
    WARPS: gl.constexpr = gl.num_warps()
    o_thread = gl.arange(0, 32 * WARPS, layout=thread_layout(WARPS))
    words = ()
    for i in gl.static_range(len(pages)):
        o_block = tile * BN + i * 8 * WARPS + o_thread // 16 * 4 + o_thread % 4
        words = words + load_rows(p_pages, pages[i], o_block < longest, UNITS)
    return words


@gluon.jit
def _sum_of_heads(b_score, HEADS_PAD: gl.constexpr):
    """Scores of members ``[8, n]`` summed over the heads of a row, ``[8 / HEADS_PAD, n]``.

    Bit by bit of the member's number: Triton 3.6 is wrong about an axis whose lanes are not adjacent.
    """
    N: gl.constexpr = b_score.shape[1]
    if HEADS_PAD >= 2:
        b_score = gl.sum(gl.reshape(b_score, [4, 2, N]), axis=1)
    if HEADS_PAD >= 4:
        b_score = gl.sum(gl.reshape(b_score, [2, 2, N]), axis=1)
    if HEADS_PAD >= 8:
        b_score = gl.sum(gl.reshape(b_score, [1, 2, N]), axis=1)
    return b_score


@gluon.jit
def index_scores_volta_kernel(
    p_queries, stride_query_row, stride_query_head, p_pages, p_tables, stride_table, p_positions,
    p_group_request, p_group_start, p_group_rows, p_scores, stride_scores, splits, scale,
    HEADS: gl.constexpr, HEADS_PAD: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr,
    BN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One program scores every ``splits``-th tile of ``BN`` keys of a group's request, for all its rows.

    Arguments as in the plain kernel; pages are int32 words.
    """
    i_group, i_split = gl.program_id(0), gl.program_id(1)
    SETS: gl.constexpr = BN // (8 * WARPS)
    PARTS: gl.constexpr = DIM // 64
    UNITS: gl.constexpr = DIM // 2
    rows = gl.load(p_group_rows + i_group)
    start = gl.load(p_group_start + i_group).to(gl.int64)
    request = gl.load(p_group_request + i_group)
    p_table = p_tables + gl.where(rows > 0, request, 0).to(gl.int64) * stride_table
    longest = 0
    for row in gl.static_range(ROWS):
        position = gl.load(p_positions + start + row, mask=row < rows, other=-1).to(gl.int32)
        longest = gl.maximum(longest, (position + 1) // 4)

    queries = ()
    for tile in gl.static_range(TILES):
        for part in gl.static_range(PARTS):
            queries = queries + (
                _queries(
                    p_queries, stride_query_row, stride_query_head, start, rows, tile, part, HEADS, HEADS_PAD
                ),
            )  # fmt: skip
    b_zero = gl.full([32 * WARPS, 8], 0.0, gl.float32, layout=fragment_layout(WARPS))
    b_none = _sum_of_heads(gl.full([8, 8 * WARPS], 0.0, gl.float32, layout=scores_layout(WARPS)), HEADS_PAD)
    SUMS: gl.constexpr = b_none.type.layout
    TILE_ROWS: gl.constexpr = 8 // HEADS_PAD
    o_tile_row = gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, SUMS))
    o_key = gl.arange(0, 8 * WARPS, layout=gl.SliceLayout(0, SUMS))
    visible = ()
    for tile in gl.static_range(TILES):
        o_row = tile * TILE_ROWS + o_tile_row
        b_position = gl.load(p_positions + start + o_row, mask=o_row < rows, other=-1)
        visible = visible + ((b_position.to(gl.int32) + 1) // 4,)

    pages = _pages(p_table, i_split, longest, BN, SETS)
    keys = _keys(p_pages, pages, i_split, longest, BN, UNITS)
    pages = _pages(p_table, i_split + splits, longest, BN, SETS)
    for i_tile in range(i_split, gl.cdiv(longest, BN), splits):
        words = keys
        keys = _keys(p_pages, pages, i_tile + splits, longest, BN, UNITS)
        pages = _pages(p_table, i_tile + 2 * splits, longest, BN, SETS)
        for i_set in gl.static_range(SETS):
            o_block = i_tile * BN + i_set * 8 * WARPS + o_key
            for tile in gl.static_range(TILES):
                b_sum = b_zero
                for part in gl.static_range(PARTS):
                    b_key = half_key_fragment(words, i_set * PARTS + part)
                    b_sum = multiply_rows(queries[tile * PARTS + part], b_key, b_sum)
                b_score = _sum_of_heads(gl.maximum(gather_scores(b_sum), 0.0), HEADS_PAD) * scale
                o_row = tile * TILE_ROWS + o_tile_row
                p_out = p_scores + ((start + o_row) * stride_scores)[:, None] + o_block[None, :]
                gl.store(p_out, b_score, mask=o_block[None, :] < visible[tile][:, None])
