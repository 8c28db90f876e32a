"""Fragments of ``mma.m8n8k4``, the tensor-core instruction of compute capability 7.0, for Gluon kernels.

The four quad-pairs of a warp (lanes ``4 i`` to ``4 i + 3`` and the same 16 further up) each multiply
``[8, 4] x [4, 8]`` in one instruction. There is no layout of Gluon for it, so what it takes and gives is
written down as a *fragment*: a tensor ``[threads, 8]`` whose row ``t`` is in eight registers of thread ``t``.
A fragment of FP16 operands is int32, two numbers a register, and belongs to four instructions in a row:

- the left operand, and the right one of a product with rows (``Q K^T``): lane ``l`` holds row
  ``l % 4 + 4 (l / 16)``, registers ``2 s`` and ``2 s + 1`` its four numbers of step ``s``;
- the right operand of a product with columns (``P V``): lane ``l`` holds row ``l % 4`` and columns
  ``4 (l / 16)`` to ``4 (l / 16) + 3``;
- the sum (FP32): register ``r`` is row ``l % 2 + 2 (r / 2 % 2) + 4 (l / 16)`` and column
  ``4 (r / 4) + 2 (l / 2 % 2) + r % 2``.

Source: the PTX ISA, "Matrix fragments for mma.m8n8k4 with .f16 floating point type".
"""

# mypy: disallow-untyped-defs=False, disable-error-code="assignment"
# ruff: noqa: RUF005 (Triton compiles no unpacking in tuples)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from page4.kernels.gluon_tiles import decode_lines

MEMBERS = 8  # rows of an instruction
_STEPS = 4  # instructions that one fragment feeds


def _product(right: str, total: int, left_at: int, right_at: int) -> str:
    """One instruction: registers from ``$total`` on += ``$left_at`` and the next times ``$right_at``."""
    sums = ", ".join(f"${total + i}" for i in range(8))
    left, other = (f"{{${first}, ${first + 1}}}" for first in (left_at, right_at))
    return f"mma.sync.aligned.m8n8k4.row.{right}.f32.f16.f16.f32 {{{sums}}}, {left}, {other}, {{{sums}}};"


def _added_to(sums: int, operands: int) -> str:
    """Constraints of inline assembly: FP32 sums, int32 operands, and the sums' values before."""
    return ",".join(["=f"] * sums + ["r"] * operands + [str(i) for i in range(sums)])


_ROWS = gl.constexpr("\n".join(_product("col", 0, 8 + 2 * step, 16 + 2 * step) for step in range(_STEPS)))
_COLUMNS = gl.constexpr("\n".join(_product("row", 0, 8 + 2 * step, 16 + 2 * step) for step in range(_STEPS)))
_ONE_SUM = gl.constexpr(_added_to(8, 16))
# Two fragments on the right: per step two registers for the first sum, then two for the second.
_COLUMN_PAIRS = gl.constexpr(
    "\n".join(
        _product("row", 8 * j, 16 + 2 * step, 24 + 4 * step + 2 * j) for step in range(_STEPS) for j in (0, 1)
    )
)
_TWO_SUMS = gl.constexpr(_added_to(16, 24))


def decode_pairs_assembly(kv_format: str) -> str | None:
    """PTX that decodes word ``$2``, four codes, to two FP16 pairs ``$0`` and ``$1``; None for FP16 pages."""
    if kv_format == "fp16":
        return None
    if kv_format == "int8":
        # The code plus 128 becomes the last mantissa bits of 1024; 0x6480 is 1152.
        pairs = "".join(
            f"prmt.b32 x, s, 0x64646464, {selector}; sub.f16x2 ${i}, x, y;\n"
            for i, selector in enumerate(("0x4140", "0x4342"))
        )
        return f"{{ .reg .b32 x, y, s;\nxor.b32 s, $2, 0x80808080; mov.b32 y, 0x64806480;\n{pairs}}}"
    low, high = decode_lines(kv_format, "$2")
    return f"{{ .reg .b32 x, s;\n{low} mov.b32 $0, x;\n{high} mov.b32 $1, x;\n}}"


@gluon.constexpr_function
def fragment_layout(warps: int) -> gl.BlockedLayout:
    """Registers of a fragment ``[32 * warps, 8]``."""
    return gl.BlockedLayout([1, 8], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def scores_layout(warps: int) -> gl.DistributedLinearLayout:
    """Registers of scores ``[8 members, 8 * warps tokens]`` after :func:`gather_scores`, two a lane.

    A warp has the tokens of two adjacent blocks.
    """
    lanes = [[1, 0], [0, 2], [0, 1], [0, 4], [4, 0]]
    in_warps = [[0, 8 * 2**bit] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[2, 0]], lanes, in_warps, [], [8, 8 * warps])


@gluon.constexpr_function
def _seen_layout(warps: int) -> gl.DistributedLinearLayout:
    """Registers of an entry per token ``[2 * warps blocks, 4]`` where the columns of scores are."""
    lanes = [[0, 0], [0, 2], [0, 1], [1, 0], [0, 0]]
    in_warps = [[2 * 2**bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([], lanes, in_warps, [], [2 * warps, 4])


@gluon.constexpr_function
def _warps_layout(warps: int) -> gl.DistributedLinearLayout:
    """Registers of a number per member and warp ``[8, warps]``: every lane has all of its two members."""
    registers = [[0, 2**bit] for bit in range(warps.bit_length() - 1)] + [[2, 0]]
    lanes = [[1, 0], [0, 0], [0, 0], [0, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0]] * (warps.bit_length() - 1), [], [8, warps])


@gluon.constexpr_function
def _output_layout(runs: int, warps: int) -> gl.DistributedLinearLayout:
    """Registers of the output ``[8, 32 * runs * warps]`` as :func:`gather_output` finds it."""
    registers = [[0, 1]] + [[0, 4 * 2**bit] for bit in range(runs.bit_length() - 1)]
    registers += [[2, 0], [0, 4 * runs]]
    lanes = [[1, 0], [0, 2], [0, 8 * runs], [0, 16 * runs], [4, 0]]
    in_warps = [[0, 32 * runs * 2**bit] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, in_warps, [], [8, 32 * runs * warps])


@gluon.constexpr_function
def query_layout(members: int, dim: int, run: int) -> gl.SharedLinearLayout:
    """Shared memory of Q ``[members, dim]`` in the order in which lanes take it as left operands.

    A lane's quarter of a token's K comes in runs of ``run`` numbers, and Q must lie alike. Eight numbers of a
    lane, of two steps, are 16 bytes, and the lanes of a warp follow each other.
    """
    within = [(0, 1), (0, 2), (0, 4)]
    lanes = [(1, 0), (2, 0), (0, run), (0, 2 * run), (4, 0)]
    steps = [(0, 8)] if run == 16 else []
    steps += [(0, 2**bit) for bit in range((4 * run).bit_length() - 1, dim.bit_length() - 1)]
    steps += [(2**bit, 0) for bit in range(3, members.bit_length() - 1)]
    return gl.SharedLinearLayout([list(basis) for basis in within + lanes + steps])


@gluon.constexpr_function
def weights_layout(tokens: int) -> gl.SharedLinearLayout:
    """Shared memory of FP16 weights ``[8, tokens]``: 256 bytes for every 16 tokens, 32 for a row of them.

    The last four rows have their halves of 16 bytes exchanged, which keeps the banks of stores apart.
    """
    bases = [(0, 1), (0, 2), (0, 4), (0, 8), (1, 0), (2, 0), (4, 8)]
    bases += [(0, 2**bit) for bit in range(4, tokens.bit_length() - 1)]
    return gl.SharedLinearLayout([list(basis) for basis in bases])


@gluon.jit
def _repeat(x, SHAPE: gl.constexpr):
    """Repeat along axes of length 1, in threads whose layout repeats them already: nothing moves."""
    repeated, _ = gl.broadcast(x, gl.full(SHAPE, 0, x.dtype, layout=x.type.layout))
    return repeated


@gluon.jit
def as_fragment(x):
    """A tensor of 8 values a thread, in the order of threads and registers, as a fragment."""
    WARPS: gl.constexpr = gl.num_warps()
    return gl.convert_layout(gl.reshape(x, [32 * WARPS, 8]), fragment_layout(WARPS), assert_trivial=True)


@gluon.jit
def decode_pairs(b_word, DECODE: gl.constexpr):
    """FP16 pairs of int32 words ``[threads, W]``, in order: ``[threads, 2 W]``; FP16 passes through."""
    if DECODE is None:
        return b_word
    else:
        b_low, b_high = gl.inline_asm_elementwise(
            DECODE, "=&r,=&r,r", [b_word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        return gl.reshape(gl.join(b_low, b_high), [b_word.shape[0], 2 * b_word.shape[1]])


@gluon.jit
def half_key_fragment(words, i: gl.constexpr):
    """The right operand for the ``i``-th 16 numbers of every lane, of FP16 rows from :func:`load_rows`."""
    return as_fragment(gl.permute(gl.join(words[2 * i], words[2 * i + 1]), [0, 2, 1]))


@gluon.jit
def multiply_rows(b_left, b_right, b_sum):
    """``b_sum`` plus the product of the left operand's rows with the right one's rows."""
    return gl.inline_asm_elementwise(
        _ROWS, _ONE_SUM, [b_left, b_right, b_sum], dtype=gl.float32, is_pure=True, pack=8
    )


@gluon.jit
def multiply_columns(b_left, b_right, b_sum):
    """``b_sum`` plus the product of the left operand's rows with the right one's columns."""
    return gl.inline_asm_elementwise(
        _COLUMNS, _ONE_SUM, [b_left, b_right, b_sum], dtype=gl.float32, is_pure=True, pack=8
    )


@gluon.jit
def multiply_column_pairs(b_left, b_first, b_last, b_sum, b_other):
    """The same for columns that are twice as many: ``b_first`` has those of steps 0 and 1 for both sums."""
    return gl.inline_asm_elementwise(
        _COLUMN_PAIRS, _TWO_SUMS, [b_left, b_first, b_last, b_sum, b_other],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def halves(x):
    """``[threads, 2 N]`` as its first and its last N columns; nothing moves."""
    N: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, N]), [0, 2, 1]))


@gluon.jit
def query_fragment(s_q, tile: gl.constexpr, part: gl.constexpr, D: gl.constexpr):
    """The left operand of a tile of eight members for the ``part``-th 16 numbers of every lane."""
    WARPS: gl.constexpr = gl.num_warps()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    s_pieces = s_q._reinterpret(gl.int32, [s_q.shape[0] // 8 * (D // 32), 1, 32, 4], PLAIN)
    first: gl.constexpr = tile * (D // 32) + 2 * part
    b_first = _repeat(s_pieces.index(first).load(LOAD), [WARPS, 32, 4])
    b_last = _repeat(s_pieces.index(first + 1).load(LOAD), [WARPS, 32, 4])
    return as_fragment(gl.permute(gl.join(b_first, b_last), [0, 1, 3, 2]))


@gluon.jit
def weight_fragment(s_weights, i: gl.constexpr):
    """The left operand of the ``i``-th 16 tokens of weights ``[8, tokens]`` in :func:`weights_layout`."""
    WARPS: gl.constexpr = gl.num_warps()
    LOAD: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 8], [1, 2, 4, 4, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    PAIRS: gl.constexpr = gl.SharedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 1, 0, 0, 4]]
    )
    s_parts = s_weights._reinterpret(gl.int32, [s_weights.shape[1] // 16, 1, 2, 1, 4, 8], PAIRS)
    return as_fragment(_repeat(s_parts.index(i).load(LOAD), [WARPS, 2, 4, 4, 8]))


@gluon.jit
def _in_upper(x, LANES: gl.constexpr):
    """Whether the thread's lane has bit ``LANES``; broadcasts to x ``[threads, A, B]``."""
    LAYOUT: gl.constexpr = x.type.layout
    o_thread = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    return ((o_thread & LANES) != 0)[:, None, None]


@gluon.jit
def _from_lane(x, LANES: gl.constexpr):
    """What the lane ``LANES`` away holds."""
    SHUFFLE: gl.constexpr = f"shfl.sync.bfly.b32 $0, $1, {LANES}, 0x1f, 0xffffffff;"
    return gl.inline_asm_elementwise(SHUFFLE, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _add_half(x, LANES: gl.constexpr):
    """Sums with the lane ``LANES`` away of pairs on the last axis: lower lanes keep the first of a pair."""
    b_first, b_last = gl.split(x)
    m_upper = _in_upper(b_first, LANES)
    return gl.where(m_upper, b_last, b_first) + _from_lane(gl.where(m_upper, b_first, b_last), LANES)


@gluon.jit
def gather_scores(b_sum):
    """Add the four quad-pairs' sums: ``[8, 8 * warps]`` in :func:`scores_layout`, a quarter in each."""
    WARPS: gl.constexpr = gl.num_warps()
    x = gl.permute(gl.reshape(b_sum, [32 * WARPS, 2, 2, 2]), [0, 2, 3, 1])
    x = _add_half(x, 8)
    x = _add_half(gl.reshape(x, [32 * WARPS, 2, 1, 2]), 4)
    x = gl.permute(gl.reshape(x, [WARPS, 2, 2, 2, 2, 2, 2]), [1, 6, 5, 0, 2, 4, 3])
    return gl.convert_layout(gl.reshape(x, [8, 8 * WARPS]), scores_layout(WARPS), assert_trivial=True)


@gluon.jit
def seen_of_tokens(s_seen):
    """The row masks of a set's blocks ``[2 * warps]``, bit 4 m: row m sees the column's token."""
    WARPS: gl.constexpr = gl.num_warps()
    SEEN: gl.constexpr = _seen_layout(WARPS)
    o_token = gl.arange(0, 4, layout=gl.SliceLayout(0, SEEN))[None, :]
    b_seen = s_seen.load(gl.SliceLayout(1, SEEN))[:, None] >> o_token
    return gl.convert_layout(
        gl.reshape(b_seen, [8 * WARPS]), gl.SliceLayout(0, scores_layout(WARPS)), assert_trivial=True
    )


@gluon.jit
def load_token_scales(p_scales, s_block, s_seen):
    """Scales of a set's tokens ``[8 * warps]`` where scores have their columns; 1 where no row sees one."""
    WARPS: gl.constexpr = gl.num_warps()
    SEEN: gl.constexpr = _seen_layout(WARPS)
    o_token = gl.arange(0, 4, layout=gl.SliceLayout(0, SEEN))[None, :]
    b_block = s_block.load(gl.SliceLayout(1, SEEN))[:, None]
    m_token = (s_seen.load(gl.SliceLayout(1, SEEN))[:, None] & (0x11111111 << o_token)) != 0
    b_scale = gl.load(p_scales + (b_block.to(gl.int64) * 4 + o_token), mask=m_token, other=1.0)
    return gl.convert_layout(
        gl.reshape(b_scale, [8 * WARPS]), gl.SliceLayout(0, scores_layout(WARPS)), assert_trivial=True
    )


@gluon.jit
def for_members(b_member):
    """A number per member ``[8]``, which has the layout of scores' rows, where a sum has its rows."""
    WARPS: gl.constexpr = gl.num_warps()
    AXES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 1, 2, 2, 2], [1, 2, 4, 2, 2, 1, 1, 1], [WARPS, 1, 1, 1, 1, 1, 1, 1],
        [7, 6, 5, 4, 3, 2, 1, 0],
    )  # fmt: skip
    x = gl.permute(gl.reshape(b_member, [2, 2, 2]), [0, 2, 1])
    x = gl.convert_layout(gl.reshape(x, [1, 2, 1, 1, 2, 1, 2, 1]), AXES)
    return as_fragment(_repeat(x, [WARPS, 2, 4, 2, 2, 2, 2, 2]))


@gluon.jit
def warp_maximum(x):
    """Maxima of scores over each warp's tokens: ``[8, warps]``."""
    return gl.max(gl.reshape(x, [8, gl.num_warps(), 8]), axis=2)


@gluon.jit
def warp_sum(x):
    """Sums over each warp's tokens: ``[8, warps]``."""
    return gl.sum(gl.reshape(x, [8, gl.num_warps(), 8]), axis=2)


@gluon.jit
def maximum_of_warps(s_warps):
    """Maxima ``[8]`` of what the warps left in shared memory ``[8, warps]``."""
    WARPS: gl.constexpr = gl.num_warps()
    b_warps = s_warps.load(_warps_layout(WARPS))
    return gl.convert_layout(gl.max(b_warps, axis=1), gl.SliceLayout(1, scores_layout(WARPS)))


@gluon.jit
def sum_of_warps(s_warps):
    """Sums ``[8]`` of what the warps left in shared memory ``[8, warps]``."""
    WARPS: gl.constexpr = gl.num_warps()
    b_warps = s_warps.load(_warps_layout(WARPS))
    return gl.convert_layout(gl.sum(b_warps, axis=1), gl.SliceLayout(1, scores_layout(WARPS)))


@gluon.jit
def gather_output(b_sums):
    """The output ``[8, D]`` of a tile's sums, one or two fragments."""
    WARPS: gl.constexpr = gl.num_warps()
    RUNS: gl.constexpr = len(b_sums)
    x = b_sums[0] if RUNS == 1 else gl.join(b_sums[0], b_sums[1])
    # [warp, half warp, quad-pair, pair of columns, row, half of the columns, row, column, run]
    x = gl.reshape(x, [WARPS, 2, 4, 2, 2, 2, 2, 2, RUNS])
    x = gl.reshape(gl.permute(x, [1, 6, 4, 0, 2, 5, 8, 3, 7]), [8, 32 * RUNS * WARPS])
    return gl.convert_layout(x, _output_layout(RUNS, WARPS), assert_trivial=True)


@gluon.constexpr_function
def thread_layout(warps: int) -> gl.SliceLayout:
    """A number per thread ``[32 * warps]``."""
    return gl.SliceLayout(1, gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0]))


@gluon.jit
def load_rows(p_rows, b_four, m_row, UNITS: gl.constexpr):
    """Eight rows a warp as stored, where they are right operands: a tuple of words ``[threads, 4]``.

    Rows have ``UNITS`` int32 words, and four lie together: ``b_four`` ``[threads]`` says which four a half
    warp takes. A lane takes a quarter of one row, in runs of 16 bytes that lie 64 bytes apart; 0 where its
    ``m_row`` is false.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    o_thread = gl.arange(0, 32 * WARPS, layout=thread_layout(WARPS))
    o_word = gl.arange(0, 4, layout=gl.SliceLayout(0, LOAD))
    o_row = b_four.to(gl.int64) * (4 * UNITS) + (o_thread % 4 * UNITS + o_thread // 4 % 4 * 4)
    p_row = p_rows + o_row[:, None] + o_word[None, :]
    words = ()
    for run in gl.static_range(UNITS // 16):
        words = words + (gl.load(p_row + run * 16, mask=m_row[:, None], other=0),)
    return words


@gluon.jit
def load_keys(p_k, s_block, s_seen, UNITS: gl.constexpr):
    """A set's K, :func:`load_rows` of two blocks a warp; 0 where no row of the group sees the token."""
    WARPS: gl.constexpr = gl.num_warps()
    THREAD: gl.constexpr = thread_layout(WARPS)
    b_block, b_seen = _of_half_warp(s_block, THREAD), _of_half_warp(s_seen, THREAD)
    o_token = gl.arange(0, 32 * WARPS, layout=THREAD) % 4
    return load_rows(p_k, b_block, (b_seen & (0x11111111 << o_token)) != 0, UNITS)


@gluon.jit
def _of_half_warp(s_list, THREAD: gl.constexpr):
    """Entry per half warp ``[2 * warps]`` in all of its threads."""
    WARPS: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    b_entry = s_list.load(gl.SliceLayout(1, HALF))[:, None]
    b_entry, _ = gl.broadcast(b_entry, gl.full([2 * WARPS, 16], 0, gl.int32, layout=HALF))
    return gl.convert_layout(gl.reshape(b_entry, [32 * WARPS]), THREAD, assert_trivial=True)


@gluon.jit
def load_values(p_v, s_block, s_seen, UNITS: gl.constexpr):
    """V of four blocks as stored, where it is multiplied: words ``[threads, 4 * UNITS / (8 * warps)]``.

    A warp takes its slice of every token; a lane adjacent words of one token of each block; 0 where no row
    sees the token.
    """
    WARPS: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = UNITS // (8 * WARPS)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4, WORDS], [32, 1, 1], [WARPS, 1, 1], [2, 1, 0])
    o_thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))[:, None]
    o_word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOAD)))
    b_block = s_block.load(gl.SliceLayout(0, gl.SliceLayout(2, LOAD)))[None, :]
    b_seen = s_seen.load(gl.SliceLayout(0, gl.SliceLayout(2, LOAD)))[None, :]
    o_token = o_thread % 4
    m_token = (b_seen & (0x11111111 << o_token)) != 0
    o_slice = o_thread // 32 * (8 * WORDS) + (o_thread // 4 % 4 * 2 + o_thread // 16 % 2) * WORDS
    o_value = b_block.to(gl.int64) * (4 * UNITS) + (o_token * UNITS + o_slice)
    b_word = gl.load(p_v + o_value[:, :, None] + o_word[None, None, :], mask=m_token[:, :, None], other=0)
    return gl.reshape(b_word, [32 * WARPS, 4 * WORDS])
