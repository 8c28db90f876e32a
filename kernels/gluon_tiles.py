"""What the Gluon kernels of grouped attention share: the split's blocks, and how K and V travel.

K and V are copied as stored, asynchronously and several turns ahead, into a ring in shared memory. From there
they go in wide loads straight into registers, as the operands of a tensor-core instruction, and are decoded
there, without a shuffle. That works because a matrix product does not care in which order a sum runs: each
kernel numbers dimensions and tokens so that what a lane needs lies together.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

GLUON_FORMATS = ("fp16", "e4m3", "e5m2", "e3m4", "e2m5")


def decode_assembly(kv_format: str, native: bool) -> str | None:
    """PTX that decodes word ``$4``, four codes, to FP16 numbers ``$0`` to ``$3``; None for FP16 pages.

    By bits: two bytes at a time are spread to the halves of x, where exponent and mantissa move next to each
    other under the sign; the numbers are then over ``BITS_UNIT``. ``native`` (e4m3 on compute capability 8.9
    and newer) converts two codes with one instruction, and to their values.
    """
    if kv_format == "fp16":
        return None
    if native:
        low, high = "cvt.rn.f16x2.e4m3x2 x, low;", "cvt.rn.f16x2.e4m3x2 x, high;"
        declare = ".reg .b16 low, high; mov.b32 {low, high}, $4;"
    else:
        low, high = decode_lines(kv_format, "$4")
        declare = ".reg .b32 s;"
    return f"{{ .reg .b32 x; {declare}\n{low} mov.b32 {{$0, $1}}, x;\n{high} mov.b32 {{$2, $3}}, x;\n}}"


def decode_lines(kv_format: str, word: str) -> tuple[str, str]:
    """PTX that decodes the lower two and the upper two codes of a word to an FP16 pair in register ``x``.

    It changes register ``s``, too.
    """
    # A prmt selector names a byte of the word for each byte of x, and 4 for a zero.
    selectors = ("0x1404", "0x3424") if kv_format == "e5m2" else ("0x4140", "0x4342")
    move = {
        # The sign bit must move further than the others: added to itself 1, 3 or 7 times, by 1 to 3 places.
        "e4m3": "and.b32 s, x, 0x00800080; add.u32 x, x, s; shl.b32 x, x, 7;",
        "e3m4": "and.b32 s, x, 0x00800080; mad.lo.u32 x, s, 3, x; shl.b32 x, x, 6;",
        "e2m5": "and.b32 s, x, 0x00800080; mad.lo.u32 x, s, 7, x; shl.b32 x, x, 5;",
        "e5m2": "",
    }[kv_format]
    low, high = (f"prmt.b32 x, {word}, 0, {selector}; {move}" for selector in selectors)
    return low, high


@gluon.jit
def decode(b_word, DECODE: gl.constexpr):
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
def ring_layout(row_bytes: int, unit_bytes: int, run_bytes: int, rows_apart: int) -> gl.SwizzledSharedLayout:
    """Shared memory of a tile ``[tokens, units]``; lanes read runs of rows ``rows_apart`` tokens apart.

    Their banks would be the same: exclusive or with the row's number moves the runs into different parts of
    the 128 bytes that all banks hold.
    """
    phases = min(128, row_bytes) // run_bytes
    return gl.SwizzledSharedLayout(
        run_bytes // unit_bytes, max(rows_apart, 128 // row_bytes), max(1, phases), [1, 0]
    )


@gluon.constexpr_function
def value_layout(tokens: int, run: int, runs: int, warps: int) -> gl.DistributedLinearLayout:
    """Registers of a tile ``[tokens, 8 * run * runs * warps units]`` of V.

    Lanes of a quad hold a block of four tokens each, the eight quads adjacent runs of units; a warp has
    ``runs`` times eight runs side by side.
    """
    registers = [(0, 2**bit) for bit in range(run.bit_length() - 1)] + [(1, 0), (2, 0)]
    registers += [(0, 8 * run * 2**bit) for bit in range(runs.bit_length() - 1)]
    registers += [(2**bit, 0) for bit in range(4, tokens.bit_length() - 1)]
    lanes = [(4, 0), (8, 0), (0, run), (0, 2 * run), (0, 4 * run)]
    slices = [(0, 8 * run * runs * 2**bit) for bit in range(warps.bit_length() - 1)]
    shape = [tokens, 8 * run * runs * warps]
    return gl.DistributedLinearLayout(
        *([list(basis) for basis in bases] for bases in (registers, lanes, slices, [])), shape
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
def tile_offsets(s_block, s_seen, turn, TOKENS: gl.constexpr, UNITS: gl.constexpr, WIDE: gl.constexpr):
    """Where a turn's tokens lie in the pages ``[TOKENS, UNITS]``, and whether any row sees them."""
    COPY: gl.constexpr = _copy_layout(TOKENS, UNITS, WIDE, gl.num_warps(), False)
    ENTRIES: gl.constexpr = _copy_layout(TOKENS, UNITS, WIDE, gl.num_warps(), True)
    o_token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, COPY)) % 4
    o_unit = gl.arange(0, UNITS, layout=gl.SliceLayout(0, COPY))
    b_block = _per_token(s_block.index(turn), COPY, ENTRIES)  # physical blocks
    b_seen = _per_token(s_seen.index(turn), COPY, ENTRIES)  # bit 4 m + t: row m sees token t
    o_tile = ((b_block.to(gl.int64) * 4 + o_token) * UNITS)[:, None] + o_unit[None, :]
    return o_tile, (((b_seen >> o_token) & 0x11111111) != 0)[:, None]


@gluon.jit
def fetch_tile(p_pages, s_tile, s_block, s_seen, turn):
    """Start to copy a turn's K or V as stored, ``[tokens, units]``; 0 where no row sees the token."""
    WIDE: gl.constexpr = 128 // p_pages.dtype.element_ty.primitive_bitwidth
    o_tile, m_tile = tile_offsets(s_block, s_seen, turn, s_tile.shape[0], s_tile.shape[1], WIDE)
    async_copy.async_copy_global_to_shared(s_tile, p_pages + o_tile, mask=m_tile)
    async_copy.commit_group()


@gluon.jit
def fetch_tiles(p_k, p_v, s_k, s_v, s_block, s_seen, turn):
    """Start to copy a turn's K and V as stored, ``[tokens, units]`` each; 0 where no row sees the token."""
    WIDE: gl.constexpr = 128 // p_k.dtype.element_ty.primitive_bitwidth
    o_tile, m_tile = tile_offsets(s_block, s_seen, turn, s_k.shape[0], s_k.shape[1], WIDE)
    async_copy.async_copy_global_to_shared(s_k, p_k + o_tile, mask=m_tile)
    async_copy.async_copy_global_to_shared(s_v, p_v + o_tile, mask=m_tile)
    async_copy.commit_group()


def listed_turns(capacity: int, tile_tokens: int, splits: int, num_warps: int, num_stages: int) -> int:
    """Turns that a split has room for in shared memory: its most, and those fetched past its end.

    In whole loads of 1, 2 or 4 blocks a thread, as few as make about 16 loads.
    """
    blocks, threads = tile_tokens // 4, 32 * num_warps
    needed = triton.cdiv(triton.cdiv(capacity, blocks), splits) + num_stages - 1
    if needed * blocks <= threads:
        return triton.next_power_of_2(needed)
    entries = min(4, triton.next_power_of_2(triton.cdiv(needed * blocks, 16 * threads)))
    step = entries * threads // blocks
    return triton.cdiv(needed, step) * step


@gluon.constexpr_function
def _listed_at_once(entries: int, warps: int) -> int:
    """The most entries, a power of two up to 4 a thread, of which ``entries`` is a multiple."""
    return min(entries & -entries, 128 * warps)


@gluon.jit
def open_group(p_counts, p_group_request, p_group_start, p_group_rows, i_group):
    """Rows, first row, request and listed blocks of a group, loaded at once; a padding group lists none."""
    rows = gl.load(p_group_rows + i_group)
    count = gl.load(p_counts + i_group)
    request = gl.load(p_group_request + i_group)
    first_row = gl.load(p_group_start + i_group)
    return rows, first_row, request, gl.where(rows > 0, count, 0)


@gluon.jit
def list_blocks(
    p_tables, stride_table, p_blocks, p_masks, capacity, count, request, i_group, i_head, i_split,
    HKV: gl.constexpr, SPLITS: gl.constexpr, TURNS: gl.constexpr, BLOCKS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The split's turns, their physical blocks ``[TURNS, BLOCKS]`` and who sees them, in shared memory.

    Turns past the end see nothing. Entries are loaded before their count is known: those beyond it lie in the
    list, and mean nothing.
    """
    turns = gl.cdiv(gl.maximum(gl.cdiv(count, BLOCKS) - i_split, 0), SPLITS)
    s_block = gl.allocate_shared_memory(gl.int32, [TURNS, BLOCKS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s_seen = gl.allocate_shared_memory(gl.int32, [TURNS, BLOCKS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    LISTED: gl.constexpr = _listed_at_once(TURNS * BLOCKS, WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_block_list = s_block._reinterpret(gl.int32, [TURNS * BLOCKS // LISTED, LISTED], PLAIN)
    s_seen_list = s_seen._reinterpret(gl.int32, [TURNS * BLOCKS // LISTED, LISTED], PLAIN)
    o_listed = gl.arange(
        0, LISTED, layout=gl.BlockedLayout([max(1, LISTED // (32 * WARPS))], [32], [WARPS], [0])
    )
    o_list = i_group.to(gl.int64) * capacity
    p_table = p_tables + request.to(gl.int64) * stride_table
    for step in gl.static_range(TURNS * BLOCKS // LISTED):
        o_entry = step * LISTED + o_listed
        o_entry = (o_entry // BLOCKS * SPLITS + i_split) * BLOCKS + o_entry % BLOCKS
        b_seen = gl.load(p_masks + o_list + o_entry, mask=o_entry < capacity, other=0)
        b_block = gl.load(p_blocks + o_list + o_entry, mask=o_entry < capacity, other=0)
        m_entry = (o_entry < count) & (b_seen != 0)
        b_page = gl.load(p_table + b_block // 4, mask=m_entry, other=0)
        s_seen_list.index(step).store(gl.where(m_entry, b_seen, 0))
        s_block_list.index(step).store((b_page.to(gl.int32) * HKV + i_head) * 4 + b_block % 4)
    return turns, s_block, s_seen


@gluon.jit
def load_queries(
    p_q, stride_q_row, stride_q_head, first_row, rows, first_head,
    BM: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Queries of a program's members ``[BM, D]``; 0 where there is no member."""
    Q_LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    o_member = gl.arange(0, BM, layout=gl.SliceLayout(1, Q_LOAD))
    o_dim = gl.arange(0, D, layout=gl.SliceLayout(0, Q_LOAD))
    o_q = (first_row + o_member // HEADS).to(gl.int64) * stride_q_row
    o_q += (first_head + o_member % HEADS) * stride_q_head
    m_q = o_member // HEADS < gl.minimum(rows, ROWS)
    return gl.load(p_q + o_q[:, None] + o_dim[None, :], mask=m_q[:, None], other=0.0)


@gluon.jit
def part_of_members(
    o_member, i_group, i_head, i_split, first_head,
    HQ: gl.constexpr, HKV: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Where a program's members (row of the group, one of its ``HEADS`` query heads) lie among the parts."""
    GROUP: gl.constexpr = HQ // HKV
    o_first = ((i_group.to(gl.int64) * SPLITS + i_split) * HKV + i_head) * (ROWS * GROUP) + first_head % GROUP
    return o_first + o_member // HEADS * GROUP + o_member % HEADS


@gluon.jit
def write_lse(
    b_lse, p_lse, o_member, m_member, first_row, i_group, i_head, i_split, first_head,
    HQ: gl.constexpr, HKV: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Write the members' LSE, given to base 2: that of a single split as natural logarithm, or a part's."""
    if SPLITS == 1:
        o_out = (first_row + o_member // HEADS).to(gl.int64) * HQ + first_head + o_member % HEADS
        b_lse *= 0.6931471805599453  # ln 2
    else:
        o_out = part_of_members(o_member, i_group, i_head, i_split, first_head, HQ, HKV, ROWS, HEADS, SPLITS)
    gl.store(p_lse + o_out, b_lse, mask=m_member)


@gluon.jit
def write_out(
    b_out, b_live, first_row, rows, p_gate, stride_gate_row, stride_gate_head, p_out, v_factor,
    i_group, i_head, i_split, first_head, HQ: gl.constexpr, HKV: gl.constexpr, ROWS: gl.constexpr,
    HEADS: gl.constexpr, SPLITS: gl.constexpr, first_member=0,
):  # fmt: skip
    """Write ``[members, D]``: the gated output of a single split, else the split's part.

    The members are those from ``first_member`` on; ``b_live`` ``[members]``: whether one has seen a token.
    """
    BM: gl.constexpr = b_out.shape[0]
    D: gl.constexpr = b_out.shape[1]
    OUT: gl.constexpr = b_out.type.layout
    o_dim = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))[None, :]
    o_member = (first_member + gl.arange(0, BM, layout=gl.SliceLayout(1, OUT)))[:, None]
    m_out = o_member // HEADS < gl.minimum(rows, ROWS)
    if SPLITS == 1:
        o_row = (first_row + o_member // HEADS).to(gl.int64)
        o_head = first_head + o_member % HEADS
        b_out = b_out * v_factor
        if p_gate is not None:
            # A row without tokens is 0, whatever its gate holds.
            m_gate = m_out & gl.convert_layout(b_live, gl.SliceLayout(1, OUT))[:, None]
            b_gate = gl.load(
                p_gate + o_row * stride_gate_row + o_head * stride_gate_head + o_dim, mask=m_gate, other=0.0
            )
            b_gate = 1.0 + gl.exp2(b_gate.to(gl.float32) * -1.4426950408889634)
            b_out = gl.where(m_gate, b_out / b_gate, 0.0)
        p_write = p_out + (o_row * HQ + o_head) * D + o_dim
    else:
        o_part = part_of_members(o_member, i_group, i_head, i_split, first_head, HQ, HKV, ROWS, HEADS, SPLITS)
        p_write = p_out + o_part * D + o_dim
    gl.store(p_write, b_out.to(p_out.dtype.element_ty), mask=m_out)
