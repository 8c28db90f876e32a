"""Selection of key blocks on the GPU: the exact top-k of every row, then the union plan of every group.

Two launches. The first one turns a row of scores into a bitmap of the blocks that the row reads; the second
one counts and lists the bits of a group's rows. Nothing is sorted, and blocks come out ascending by
construction.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.block_plan import PackedPlan, RowGroups, plan_capacity
from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError

MAX_TOPK = 512
CHUNK_BLOCKS = 8192  # scores that one program keeps in registers
_SEGMENT_WORDS = 256  # bitmap words (of 32 blocks) that one program lists
_COUNTED_WORDS = 1024  # bitmap words before them that it counts at once
_LISTED_BLOCKS = 512  # blocks that it lists at once
_PLAN_WARPS = 8


@triton.jit
def _ordered_key(b_score):
    """An int32 that orders as the score does; -0.0 becomes +0.0.

    Keys lie strictly between INT_MIN and INT_MAX, even those of NaN: a bisection always ends.
    """
    bits = tl.where(b_score == 0.0, 0.0, b_score).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31) + 1), 2**31 - 2)


@triton.jit
def _choose(b_key, count, topk, N: tl.constexpr, K_PAD: tl.constexpr):
    """Which of ``N`` keys are the top ``min(topk, count)``, ties to the lower index. INT_MIN marks no key.

    A bisection for the k-th largest key, ``low``: at least k keys are >= low, fewer than k are >= high. It
    ends early when exactly k keys are >= low. It begins with a low that is close: each of ``topk`` disjoint
    groups of keys has a key that is at least the least of the groups' maxima. Groups are strided, so that a
    run of high scores spreads over many of them. About 12 steps separate the 512th of 8,192 scores from the
    513th; 32 are the most.
    """
    # 1,024 groups, or as many as there are keys: each thread finds the maxima of its own keys.
    GROUPS: tl.constexpr = max(K_PAD, min(N, 1024))
    m_chosen = b_key > -(2**31)
    if count > topk:
        b_maxima = tl.max(b_key.reshape(N // GROUPS, GROUPS), axis=0)  # [GROUPS]
        low = tl.min(tl.where(tl.arange(0, GROUPS) < topk, b_maxima, 2**31 - 1), axis=0)
        high = tl.max(b_maxima, axis=0) + 1
        at_low = tl.sum((b_key >= low).to(tl.int32), axis=0)
        at_high = 0
        while (at_low != topk) & (high - 1 != low):
            middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
            above = tl.sum((b_key >= middle).to(tl.int32), axis=0)
            enough = above >= topk
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
            at_low, at_high = tl.where(enough, above, at_low), tl.where(enough, at_high, above)
        m_chosen = b_key >= low
        if at_low > topk:  # more keys equal the k-th than places are left: the first of them win
            m_tied = m_chosen & (b_key < high)
            b_rank = tl.cumsum(m_tied.to(tl.int32), axis=0)
            m_chosen = m_chosen & ((b_key >= high) | (b_rank <= topk - at_high))
    return m_chosen


@triton.jit
def select_kernel(
    p_scores, stride_scores, columns, p_positions, p_bits, words, p_keys, p_blocks, p_arrivals, topk,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, K_PAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program takes ``CHUNK`` blocks of one row.

    A row of one chunk is finished here. Otherwise every chunk leaves its own top-k (block order kept), and
    the program that arrives last takes the top-k of those: the row's top-k is among them, because a block
    that its own chunk ranks below k has k better blocks. No program waits for another.
    """
    start_dependent(DEPENDENT)
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(p_positions + i_row).to(tl.int32)
    visible = (position + 1) // 4  # complete blocks
    reach = (position + 4) // 4  # with the tail block; 0 for a padded row
    first = i_chunk * CHUNK
    if first >= reach:
        return
    p_row_bits = p_bits + i_row * words
    chunks = tl.cdiv(reach, CHUNK)  # of this row

    o_block = first + tl.arange(0, CHUNK)  # [CHUNK]
    # Invisible scores are loaded and ignored, so that 16 bytes are one load when the columns allow it.
    b_score = tl.load(p_scores + i_row * stride_scores + o_block, mask=o_block < columns, other=0.0)
    m_visible = o_block < visible
    b_key = tl.where(m_visible, _ordered_key(b_score), -(2**31))
    m_chosen = _choose(b_key, tl.minimum(visible - first, CHUNK), topk, CHUNK, K_PAD)

    o_word = first // 32 + tl.arange(0, CHUNK // 32)
    m_word = o_word < tl.cdiv(reach, 32)
    if chunks == 1:
        m_read = m_chosen | ((o_block >= visible) & (o_block < reach))  # the tail
        b_bit = m_read.to(tl.int32).reshape(CHUNK // 32, 32) << tl.arange(0, 32)[None, :]
        tl.store(p_row_bits + o_word, tl.sum(b_bit, axis=1), mask=m_word)
    else:
        tl.store(p_row_bits + o_word, tl.zeros([CHUNK // 32], dtype=tl.int32), mask=m_word)
        o_row_list = i_row * (CHUNKS * K_PAD)
        o_slot = o_row_list + i_chunk * K_PAD + tl.cumsum(m_chosen.to(tl.int32), axis=0) - 1
        tl.store(p_keys + o_slot, b_key, mask=m_chosen)
        tl.store(p_blocks + o_slot, o_block, mask=m_chosen)
        # All stores of this program come before its arrival; the last one's loads come after all arrivals.
        tl.debug_barrier()
        arrived = tl.atomic_add(p_arrivals + i_row, 1, sem="acq_rel")
        if arrived == chunks - 1:
            tl.store(p_arrivals + i_row, 0)  # ready for the next launch
            o_entry = tl.arange(0, CHUNKS * K_PAD)
            listed = tl.minimum(visible - o_entry // K_PAD * CHUNK, topk)  # entries of the chunk, if positive
            m_entry = o_entry % K_PAD < listed
            b_entry = tl.load(
                p_keys + o_row_list + o_entry, mask=m_entry, other=-(2**31), cache_modifier=".cg"
            )
            count = tl.sum(m_entry.to(tl.int32), axis=0)
            m_best = _choose(b_entry, count, topk, CHUNKS * K_PAD, K_PAD)
            b_block = tl.load(p_blocks + o_row_list + o_entry, mask=m_best, other=0, cache_modifier=".cg")
            tl.atomic_or(p_row_bits + b_block // 32, 1 << (b_block % 32), mask=m_best, sem="relaxed")
            if reach > visible:
                tl.atomic_or(p_row_bits + visible // 32, 1 << (visible % 32), sem="relaxed")


@triton.jit
def _popcount(x):
    """Set bits of every uint32, as int32; compilers know this pattern as one instruction."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _bit_place(b_word, b_rank):
    """Where the set bit number ``b_rank`` (from 0) of every uint32 is: 0..31."""
    b_place = tl.zeros_like(b_rank)
    for level in tl.static_range(5):
        width = 16 >> level
        b_low = _popcount((b_word >> b_place.to(tl.uint32)) & ((1 << width) - 1))
        m_high = b_rank >= b_low
        b_rank = tl.where(m_high, b_rank - b_low, b_rank)
        b_place += tl.where(m_high, width, 0)
    return b_place


@triton.jit
def _union_words(p_bits, words, p_positions, start, rows, o_word, m_word, ROWS: tl.constexpr):
    """Bitmap words of the union of a group's rows, as uint32; without those that a row never wrote."""
    b_union = tl.zeros_like(o_word).to(tl.uint32)
    for m in tl.static_range(ROWS):
        # The words need not wait for the positions: what a row never wrote is loaded and dropped.
        b_word = tl.load(p_bits + (start + m) * words + o_word, mask=m_word & (m < rows), other=0)
        position = tl.load(p_positions + start + m, mask=m < rows, other=-1).to(tl.int32)
        b_word = tl.where(o_word < (position + 128) // 128, b_word, 0)  # cdiv(position + 1, 32 * 4)
        b_union |= b_word.to(tl.uint32, bitcast=True)
    return b_union


@triton.jit
def plan_kernel(
    p_bits, words, p_positions, p_group_start, p_group_rows, p_blocks, p_counts, p_masks, capacity,
    ROWS: tl.constexpr, SEGMENT: tl.constexpr, LEVELS: tl.constexpr, COUNTED: tl.constexpr,
    LISTED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program lists the blocks of ``SEGMENT = 2 ** LEVELS`` words of a union, ``LISTED`` at a time.

    Where its part of the list begins, it finds by counting the union's bits before it, ``COUNTED`` words at a
    time: a few KiB that are in the L2 cache. Every thread then looks for the block of its entry, so that
    entries are written side by side. The program of the last block writes the count.
    """
    start_dependent(DEPENDENT)
    i_group, i_segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(p_group_start + i_group).to(tl.int64)
    rows = tl.load(p_group_rows + i_group)
    first_word = i_segment * SEGMENT
    o_word = first_word + tl.arange(0, SEGMENT)
    b_union = _union_words(p_bits, words, p_positions, start, rows, o_word, o_word < words, ROWS)  # [SEGMENT]

    b_before = tl.zeros([COUNTED], dtype=tl.int32)
    for tile in range(0, first_word, COUNTED):
        o_before = tile + tl.arange(0, COUNTED)
        b_before += _popcount(
            _union_words(p_bits, words, p_positions, start, rows, o_before, o_before < first_word, ROWS)
        )
    base = tl.sum(b_before, axis=0)

    b_count = _popcount(b_union)
    b_end = tl.cumsum(b_count, axis=0)  # [SEGMENT] entries of the segment up to each word
    total = tl.sum(b_count, axis=0)
    reach = 0  # blocks of the group's longest row, its tail included
    for m in tl.static_range(ROWS):
        position = tl.load(p_positions + start + m, mask=m < rows, other=-1).to(tl.int32)
        reach = tl.maximum(reach, (position + 4) // 4)
    if i_segment == tl.maximum(tl.cdiv(reach, SEGMENT * 32) - 1, 0):
        tl.store(p_counts + i_group, base + total)

    o_list = i_group * capacity + base
    for first in range(0, total, LISTED):
        o_entry = first + tl.arange(0, LISTED)  # [LISTED]
        m_entry = o_entry < total
        # The first word that ends after the entry, by bisection; the last word where there is no entry.
        b_place = tl.zeros([LISTED], dtype=tl.int32)
        for level in tl.static_range(LEVELS):
            step = SEGMENT >> (level + 1)
            b_reached = tl.gather(b_end, b_place + (step - 1), axis=0)
            b_place += tl.where(b_reached <= o_entry, step, 0)
        b_rank = o_entry - tl.gather(b_end - b_count, b_place, axis=0)
        b_bit = _bit_place(tl.gather(b_union, b_place, axis=0), b_rank)
        o_found = first_word + b_place
        o_block = o_found * 32 + b_bit
        b_mask = tl.zeros([LISTED], dtype=tl.int32)
        for m in tl.static_range(ROWS):
            b_word = tl.load(p_bits + (start + m) * words + o_found, mask=m_entry & (m < rows), other=0)
            position = tl.load(p_positions + start + m, mask=m < rows, other=-1).to(tl.int32)
            tokens = tl.minimum(position + 1 - o_block * 4, 4)  # of the block, up to the row's own
            m_read = (((b_word >> b_bit) & 1) != 0) & (tokens > 0)
            b_mask |= tl.where(m_read, ((1 << tokens) - 1) << (4 * m), 0)
        tl.store(p_blocks + o_list + o_entry, o_block, mask=m_entry)
        tl.store(p_masks + o_list + o_entry, b_mask, mask=m_entry)


@dataclass(frozen=True)
class SelectionWorkspace:
    """What the two launches pass on. One may serve many steps in turn, but not two streams at once.

    Attributes:
        bits: int32 ``[N, W]``, bitmap of the blocks that a row reads.
        keys: int32 ``[N, C, K]``, ordered scores of the candidates of each chunk of a row.
        blocks: int32 ``[N, C, K]``, the candidates' blocks.
        arrivals: int32 ``[N]``, finished chunks of a row; all 0 between launches.
        max_blocks: blocks of the longest sequence that fits.
        topk: blocks that a row selects.
        chunk: blocks that one program takes.
    """

    bits: Tensor
    keys: Tensor
    blocks: Tensor
    arrivals: Tensor
    max_blocks: int
    topk: int
    chunk: int

    @classmethod
    def allocate(
        cls,
        rows: int,
        max_blocks: int,
        topk: int,
        device: torch.device | str = "cpu",
        max_chunk: int = CHUNK_BLOCKS,
    ) -> SelectionWorkspace:
        """Space for ``rows`` rows over up to ``max_blocks`` blocks, an incomplete last one included.

        ``max_chunk``, a power of two from 32 on, bounds the blocks of one program; a chunk holds at least
        ``topk`` blocks.

        Raises:
            InputError: ``topk`` outside 1..512, no blocks, or a ``max_chunk`` that is no such power of two.
        """
        if not 1 <= topk <= MAX_TOPK:
            raise InputError(f"topk must lie in 1..{MAX_TOPK}, got {topk}")
        if max_blocks < 1:
            raise InputError(f"max_blocks must be at least 1, got {max_blocks}")
        if max_chunk < 32 or max_chunk & (max_chunk - 1):
            raise InputError(f"max_chunk must be a power of two from 32 on, got {max_chunk}")
        k_pad = triton.next_power_of_2(topk)
        chunk = max(32, k_pad, min(max_chunk, triton.next_power_of_2(max_blocks)))
        chunks = triton.next_power_of_2(triton.cdiv(max_blocks, chunk))
        candidates = (rows, chunks, k_pad) if chunks > 1 else (0, 1, k_pad)
        words = triton.cdiv(max_blocks, 32)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        arrivals = torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(
            empty(rows, words), empty(*candidates), empty(*candidates), arrivals, max_blocks, topk, chunk
        )


def empty_plan(groups: RowGroups, capacity: int) -> PackedPlan:
    """A plan of the groups with room for ``capacity`` blocks each; its lists are not yet written."""
    device = groups.rows.device
    blocks, masks = (
        torch.empty(len(groups.rows), capacity, dtype=torch.int32, device=device) for _ in range(2)
    )
    counts = torch.empty(len(groups.rows), dtype=torch.int32, device=device)
    return PackedPlan(blocks, counts, masks, groups.request, groups.start, groups.rows)


def select_plan_triton(
    scores: Tensor,
    positions: Tensor,
    groups: RowGroups,
    workspace: SelectionWorkspace,
    plan: PackedPlan | None = None,
) -> PackedPlan:
    """Exact top-k of every row's visible blocks, and the packed union plan of every group, in two launches.

    The contract of :func:`~page4.kernels.block_select.select_blocks` (score descending, then lower block;
    -0.0 equals +0.0) followed by :func:`~page4.kernels.block_select.union_plan`, for blocks of 4 tokens. A
    row at position ``p`` chooses among ``(p + 1) // 4`` complete blocks, all of them if they are at most
    top-k, and reads its tail. Results are the same bits on every run.

    Shapes: ``scores`` is FP32 ``[N, NB]`` without NaN, of which only the visible columns count;
    ``positions`` is int64 ``[N]`` (-1: a padded row, which reads nothing), each below 4 times the workspace's
    ``max_blocks``, with its complete blocks among the ``NB`` columns. ``plan`` may be given to be overwritten
    (:func:`empty_plan`); its lists hold at least :func:`~page4.kernels.block_plan.plan_capacity` blocks, so
    no group can overflow. A padding group's count is 0. Nothing synchronises with the host, and with
    ``plan`` nothing is allocated.

    Raises:
        InputError: shapes or dtypes that disagree, or a workspace or plan that is too small.
    """
    rows = _check(scores, positions, workspace)
    if plan is None:
        capacity = plan_capacity(groups.rows_per_group, workspace.topk, workspace.max_blocks)
        plan = empty_plan(groups, capacity)
    _check_plan(groups, workspace, plan)
    if rows == 0 or len(groups.rows) == 0:
        return plan
    dependent = launches_dependents(scores.device)
    words, (_, chunks, k_pad) = workspace.bits.shape[1], workspace.keys.shape
    select_kernel[(rows, chunks)](
        scores, scores.stride(0), scores.shape[1], positions, workspace.bits, words,
        workspace.keys, workspace.blocks, workspace.arrivals, workspace.topk,
        CHUNK=workspace.chunk, CHUNKS=chunks, K_PAD=k_pad, DEPENDENT=dependent,
        num_warps=_warps(workspace.chunk), launch_pdl=dependent,
    )  # fmt: skip
    return plan_selected_triton(positions, groups, workspace, plan)


def plan_selected_triton(
    positions: Tensor, groups: RowGroups, workspace: SelectionWorkspace, plan: PackedPlan
) -> PackedPlan:
    """The second launch of :func:`select_plan_triton` alone: the plan of what the workspace's bitmaps select.

    Raises:
        InputError: a plan of other groups or with too little room.
    """
    _check_plan(groups, workspace, plan)
    dependent = launches_dependents(positions.device)
    words = workspace.bits.shape[1]
    if len(groups.rows):
        plan_kernel[(len(groups.rows), triton.cdiv(words, _SEGMENT_WORDS))](
            workspace.bits, words, positions, groups.start, groups.rows, plan.blocks, plan.counts, plan.masks,
            plan.blocks.shape[1],
            ROWS=groups.rows_per_group, SEGMENT=_SEGMENT_WORDS, LEVELS=_SEGMENT_WORDS.bit_length() - 1,
            COUNTED=_COUNTED_WORDS, LISTED=_LISTED_BLOCKS,
            DEPENDENT=dependent, num_warps=_PLAN_WARPS, launch_pdl=dependent,
        )  # fmt: skip
    return plan


def _warps(elements: int) -> int:
    """Warps that hold 32 elements a thread: more warps would spend their time on each step's reduction."""
    return min(8, max(4, elements // 1024))


def _check(scores: Tensor, positions: Tensor, workspace: SelectionWorkspace) -> int:
    rows = len(positions)
    if scores.ndim != 2 or scores.shape[0] != rows or scores.dtype != torch.float32 or scores.stride(1) != 1:
        raise InputError(f"scores must be FP32 [{rows}, blocks], got {scores.dtype} {list(scores.shape)}")
    if len(workspace.arrivals) < rows:
        raise InputError(f"the workspace serves {len(workspace.arrivals)} rows; there are {rows}")
    return rows


def _check_plan(groups: RowGroups, workspace: SelectionWorkspace, plan: PackedPlan) -> None:
    capacity = plan_capacity(groups.rows_per_group, workspace.topk, workspace.max_blocks)
    if plan.blocks.shape != plan.masks.shape or plan.blocks.shape[0] != len(groups.rows):
        raise InputError(f"the plan holds {plan.blocks.shape[0]} groups; there are {len(groups.rows)}")
    if plan.blocks.shape[1] < capacity:
        raise InputError(f"the plan holds {plan.blocks.shape[1]} blocks a group; {capacity} may be listed")
