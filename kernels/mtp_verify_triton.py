"""Verification of speculative drafts in three launches.

The first one reads all logits once and sums up their tiles, split over the vocabulary. The second one gathers
the rows; where a row has filters, several programs list its most probable tokens, and the one that ends last
looks for the filters' thresholds in them. The third one decides how many drafts a
request accepts and draws one more token; only where a draft's distribution or filters are involved does it
read one row of the request again, split over the vocabulary, and the program that ends last draws.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.draft_sampling import DraftDistributions
from page4.kernels.errors import InputError
from page4.kernels.filter_search_triton import filter_bounds, list_tokens, search_filters
from page4.kernels.mtp_verify import check_verify_inputs
from page4.kernels.philox import Purpose
from page4.kernels.sampling_params import SamplingParams
from page4.kernels.token_weights import ONE, ONE_IN_TILE, TILE
from page4.kernels.token_weights_triton import (
    check_on,
    draw_below,
    fixed_point,
    inverse_total,
    launch_tile_sums,
    load_logits,
    next_tiles,
    random_words,
    relative_exponent,
    relative_power,
    row_maximum,
    tile_sum,
    tiles_in_row,
)

LISTED_TOKENS = 16384  # tokens of a row that a filter's search may list
_SEARCH_CHUNK = 512
_LIST_TILES = 2
_ROW_PROGRAMS, _ALL_ROW_PROGRAMS = 32, 512  # that list a row's tokens, at most; of all rows, about
_ROW_WARPS = 4
_DECIDE_TILES, _DECIDE_WARPS, _DECIDE_PROGRAMS = 2, 8, 512  # programs of all requests, about
MAX_REGISTERS = 128  # a thread; left alone, the assembler aims lower and spills a few
_ONE, _ONE_IN_TILE = tl.constexpr(ONE), tl.constexpr(ONE_IN_TILE)
_ACCEPT, _RECOVER, _BONUS = (tl.constexpr(int(p)) for p in (Purpose.ACCEPT, Purpose.RECOVER, Purpose.BONUS))


@triton.jit
def gather_rows_kernel(
    p_logits, stride_request, stride_row, p_positions, p_scale, p_top_k, p_top_p, p_log2_min_p,
    p_allowed, stride_bits_request, stride_bits_row, p_tile_max, p_tile_sum, p_listed, p_tokens,
    p_counts, p_row_arrivals, p_max, p_total, p_threshold, p_last, vocabulary, tiles,
    ROWS: tl.constexpr, TILE: tl.constexpr, TILES_PAD: tl.constexpr, BT: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Maximum, total weight (0: no distribution) and the filters' threshold of a row.

    For a greedy request the total is the argmax instead, or -1. A row without filters needs its first program
    only; with filters all of them find the same maximum and bounds, and share the listing.
    """
    start_dependent(DEPENDENT)
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_request, i_member = i_row // ROWS, i_row % ROWS
    if tl.load(p_positions + i_request) < 0:
        return  # a padded request
    scale = tl.load(p_scale + i_request)
    top_k = tl.load(p_top_k + i_request)
    top_k = tl.where(top_k < vocabulary, top_k, 0)
    top_p = tl.load(p_top_p + i_request)
    log2_min_p = tl.load(p_log2_min_p + i_request)
    filtered = (scale > 0.0) & ((top_k > 0) | (top_p < 1.0) | (log2_min_p > -float("inf")))
    if (i_part > 0) & (filtered == 0):
        return
    o_tile = tl.arange(0, TILES_PAD)
    m_tile = o_tile < tiles
    b_tile_max = tl.load(p_tile_max + i_row * tiles + o_tile, mask=m_tile, other=-float("inf"))
    b_own = tl.load(p_tile_sum + i_row * tiles + o_tile, mask=m_tile, other=0)
    maximum, valid = row_maximum(b_tile_max)
    tl.store(p_max + i_row, maximum)
    if scale == 0.0:
        i_tile = tl.min(tl.where(b_tile_max == maximum, o_tile, TILES_PAD), axis=0)
        token = tl.sum(tl.where(o_tile == i_tile, b_own, 0), axis=0)
        tl.store(p_total + i_row, tl.where(valid, token, -1))
    else:
        total = tl.where(valid, tl.sum(tiles_in_row(b_own, b_tile_max, maximum, scale), axis=0), 0)
        threshold = tl.full([], -float("inf"), tl.float32)
        last = tl.full([], 0, tl.int32) + vocabulary
        finishes = i_part == 0
        if valid & filtered:
            log2_min_p += relative_exponent(maximum, maximum, scale)  # hardly below 0
            p_row = p_logits + i_request * stride_request + i_member * stride_row
            p_bits = p_allowed
            if p_allowed is not None:
                p_bits = p_allowed + i_request * stride_bits_request + i_member * stride_bits_row
            p_row_listed, p_row_tokens = p_listed + i_row * CAPACITY, p_tokens + i_row * CAPACITY
            least_exponent, least_key = filter_bounds(b_tile_max, total, vocabulary, top_k, top_p, log2_min_p)
            list_tokens(
                p_row, p_bits, vocabulary, p_row_listed, p_row_tokens, p_counts + i_row, b_tile_max, maximum,
                scale, least_exponent, least_key, i_part, tl.num_programs(1), TILE, TILES_PAD, BT, CAPACITY,
            )  # fmt: skip
            # All entries of this program come before its arrival; the last one's loads come after all.
            tl.debug_barrier()
            arrived = tl.atomic_add(p_row_arrivals + i_row, 1, sem="acq_rel")
            finishes = arrived == tl.num_programs(1) - 1
            if finishes:
                count = tl.load(p_counts + i_row, cache_modifier=".cg")
                tl.debug_barrier()  # nobody's load comes after the store
                tl.store(p_counts + i_row, 0)  # ready for the next launch
                tl.store(p_row_arrivals + i_row, 0)
                threshold, last, total = search_filters(
                    p_row, p_bits, vocabulary, p_row_listed, p_row_tokens,
                    tl.where(count > CAPACITY, -1, count), maximum, total, scale, top_k, top_p, log2_min_p,
                    CHUNK,
                )  # fmt: skip
        if finishes:
            tl.store(p_total + i_row, total)
            tl.store(p_threshold + i_row, threshold)
            tl.store(p_last + i_row, last)


@triton.jit
def _kept(b_logit, o_token, threshold, last):
    """Whether the filters keep tokens; never those of -inf."""
    m_kept = (b_logit > threshold) | ((b_logit == threshold) & (o_token <= last))
    return m_kept & (b_logit > -float("inf"))


@triton.jit
def _final_weights(
    p_row, p_bits, p_draft_row, o_token, vocabulary, maximum, scale, total, threshold, last, excluded,
    residual, draft_max, draft_scale, draft_total, ONE: tl.constexpr,
):  # fmt: skip
    """int64 weights for the last draw of a request: of p, without one token, or of max(p - q, 0)."""
    b_logit = load_logits(p_row, p_bits, o_token, vocabulary)
    m_kept = _kept(b_logit, o_token, threshold, last)
    b_power = tl.where(m_kept, relative_power(b_logit, maximum, scale), 0.0)
    b_weight = fixed_point(tl.where(o_token == excluded, 0.0, b_power), ONE)
    if p_draft_row is not None:  # noqa: SIM102 -- known to the compiler, unlike the next one
        if residual:
            b_draft = load_logits(p_draft_row, None, o_token, vocabulary)
            b_q = tl.where(b_draft > -float("inf"), relative_power(b_draft, draft_max, draft_scale), 0.0)
            b_q = b_q * inverse_total(draft_total)
            b_weight = fixed_point(tl.maximum(b_power * inverse_total(total) - b_q, 0.0), ONE)
    return b_weight


@triton.jit
def _sum_without(p_row, p_bits, vocabulary, excluded, i_tile, tile_max, scale, TILE: tl.constexpr):
    """The sum of a tile, as the first launch made it, without one token."""
    o_token = i_tile * TILE + tl.arange(0, TILE)
    b_logit = load_logits(p_row, p_bits, o_token, vocabulary)
    return tile_sum(tl.where(o_token == excluded, -float("inf"), b_logit), tile_max, scale)


@triton.jit
def decide_kernel(
    p_logits, stride_request, stride_row, p_drafts, stride_drafts, p_positions, p_scale, p_top_k, p_top_p,
    p_log2_min_p, p_seed, p_allowed, stride_bits_request, stride_bits_row,
    p_draft_logits, stride_draft_request, stride_draft_row, p_draft_scale, p_draft_max, p_draft_total,
    stride_draft, p_tile_max, p_tile_sum, p_max, p_total, p_threshold, p_last, p_request_tiles, p_arrivals,
    p_accepted, p_emitted, stride_emitted, vocabulary, tiles,
    ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, TILE: tl.constexpr, TILES_PAD: tl.constexpr,
    BT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """All programs of a request decide alike; the last draw is split over the vocabulary where it must be."""
    start_dependent(DEPENDENT)
    i_request, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(p_positions + i_request)
    if position < 0:
        return  # a padded request
    scale = tl.load(p_scale + i_request)
    seed = tl.load(p_seed + i_request)
    o_row = tl.arange(0, ROWS_PAD)  # [R]
    m_row, m_draft = o_row < ROWS, o_row < ROWS - 1
    o_stat = i_request * ROWS + o_row
    b_draft = tl.load(p_drafts + i_request * stride_drafts + o_row, mask=m_draft, other=-1)
    b_total = tl.load(p_total + o_stat, mask=m_row, other=0)
    m_drafted = (b_draft >= 0) & (b_draft < vocabulary)
    b_q = tl.full([ROWS_PAD], 1.0, tl.float32)
    if p_draft_logits is not None:
        o_draft = i_request * stride_draft + o_row
        b_draft_scale = tl.load(p_draft_scale + o_draft, mask=m_draft, other=0.0)
        b_draft_max = tl.load(p_draft_max + o_draft, mask=m_draft, other=0.0)
        b_draft_total = tl.load(p_draft_total + o_draft, mask=m_draft, other=0)
        m_sampled = b_draft_scale > 0.0
        m_drafted = m_drafted & ((m_sampled == 0) | (b_draft_total > 0))
        p_at = p_draft_logits + i_request * stride_draft_request + o_row.to(tl.int64) * stride_draft_row
        b_logit = tl.load(p_at + b_draft, mask=m_drafted & m_sampled, other=-float("inf")).to(tl.float32)
        b_power = relative_power(b_logit, b_draft_max, b_draft_scale)
        b_power = tl.where(b_logit > -float("inf"), b_power, 0.0) * inverse_total(b_draft_total)
        b_q = tl.where(m_sampled, b_power, 1.0)
    b_draft = tl.where(m_drafted, b_draft, -1)
    if scale == 0.0:
        m_accepts = m_drafted & (b_draft == b_total)
    else:
        b_max = tl.load(p_max + o_stat, mask=m_row, other=0.0)
        b_threshold = tl.load(p_threshold + o_stat, mask=m_row, other=0.0)
        b_last = tl.load(p_last + o_stat, mask=m_row, other=0)
        p_at = p_logits + i_request * stride_request + o_row.to(tl.int64) * stride_row
        b_logit = tl.load(p_at + b_draft, mask=m_drafted, other=-float("inf")).to(tl.float32)
        if p_allowed is not None:
            p_word = p_allowed + i_request * stride_bits_request + o_row.to(tl.int64) * stride_bits_row
            b_word = tl.load(p_word + b_draft // 32, mask=m_drafted, other=0)
            b_logit = tl.where(((b_word >> (b_draft % 32).to(tl.int32)) & 1) != 0, b_logit, -float("inf"))
        b_power = relative_power(b_logit, b_max, scale)
        b_p = tl.where(_kept(b_logit, b_draft, b_threshold, b_last), b_power, 0.0) * inverse_total(b_total)
        x0, x1, x2, x3 = random_words(seed, position + o_row, tl.full([ROWS_PAD], _ACCEPT, tl.int32))
        b_bits = ((x0.to(tl.uint64) << 32) | x1.to(tl.uint64)) >> 11
        b_uniform = b_bits.to(tl.int64).to(tl.float64) * 0.5**53
        m_accepts = m_drafted & (b_total > 0) & (b_uniform * b_q.to(tl.float64) < b_p.to(tl.float64))
    accepted = tl.min(tl.where(m_accepts, ROWS_PAD, o_row), axis=0)

    i_row = i_request * ROWS + accepted
    total = tl.load(p_total + i_row)
    draft = tl.sum(tl.where(o_row == accepted, b_draft, 0), axis=0)
    finishes = i_part == 0
    token = tl.where(scale == 0.0, total, -1)
    if (scale > 0.0) & (total > 0):
        maximum = tl.load(p_max + i_row)
        threshold = tl.load(p_threshold + i_row)
        last = tl.load(p_last + i_row)
        top_k = tl.load(p_top_k + i_request)
        in_row = ((top_k > 0) & (top_k < vocabulary)) | (tl.load(p_top_p + i_request) < 1.0)
        in_row = in_row | (tl.load(p_log2_min_p + i_request) > -float("inf"))
        residual = draft < -1  # never
        draft_max = tl.full([], 0.0, tl.float32)
        draft_scale = tl.full([], 0.0, tl.float32)
        draft_total = tl.full([], 0, tl.int64)
        p_draft_row = p_draft_logits
        if p_draft_logits is not None:
            o_chosen = i_request * stride_draft + accepted
            m_has = accepted < ROWS - 1
            draft_max = tl.load(p_draft_max + o_chosen, mask=m_has, other=0.0)
            draft_scale = tl.load(p_draft_scale + o_chosen, mask=m_has, other=0.0)
            draft_total = tl.load(p_draft_total + o_chosen, mask=m_has, other=0)
            residual = (draft >= 0) & (draft_scale > 0.0)
            o_draft_row = tl.where(m_has, accepted, 0).to(tl.int64) * stride_draft_row
            p_draft_row = p_draft_logits + i_request * stride_draft_request + o_draft_row
        excluded = tl.where(residual, -1, draft)
        in_row = in_row | residual
        p_row = p_logits + i_request * stride_request + accepted.to(tl.int64) * stride_row
        p_bits = p_allowed
        if p_allowed is not None:
            p_bits = p_allowed + i_request * stride_bits_request + accepted.to(tl.int64) * stride_bits_row
        p_own_tiles = p_request_tiles + i_request * tiles
        if in_row:
            for first_tile in range(i_part * BT, tiles, tl.num_programs(1) * BT):
                o_part = first_tile + tl.arange(0, BT)
                b_part_max = tl.load(
                    p_tile_max + i_row * tiles + o_part, mask=o_part < tiles, other=-float("inf")
                )
                b_sum = tl.zeros([BT], tl.int64)
                # Of a tile below the threshold nothing is kept, nothing is read.
                if tl.max(b_part_max, axis=0) >= threshold:
                    o_token = o_part[:, None] * TILE + tl.arange(0, TILE)[None, :]  # [BT, TILE]
                    b_limit = tl.where(b_part_max >= threshold, vocabulary, 0)
                    b_weight = _final_weights(
                        p_row, p_bits, p_draft_row, o_token, b_limit[:, None], maximum, scale, total,
                        threshold, last, excluded, residual, draft_max, draft_scale, draft_total, _ONE,
                    )  # fmt: skip
                    b_sum = tl.sum(b_weight, axis=1)
                tl.store(p_own_tiles + o_part, b_sum, mask=o_part < tiles)
            # All stores of this program come before its arrival; the last one's loads come after all.
            tl.debug_barrier()
            arrived = tl.atomic_add(p_arrivals + i_request, 1, sem="acq_rel")
            finishes = arrived == tl.num_programs(1) - 1
            if finishes:
                tl.store(p_arrivals + i_request, 0)  # ready for the next launch
        if finishes:
            o_tile = tl.arange(0, TILES_PAD)
            m_tile = o_tile < tiles
            o_row_tile = i_row * tiles + o_tile
            b_tile_max = tl.load(p_tile_max + o_row_tile, mask=m_tile, other=-float("inf"))
            if in_row:
                b_tiles = tl.load(p_own_tiles + o_tile, mask=m_tile, other=0, cache_modifier=".cg")
            else:
                b_own = tl.load(p_tile_sum + o_row_tile, mask=m_tile, other=0)
                if excluded >= 0:
                    i_tile = excluded // TILE
                    tile_max = tl.load(p_tile_max + i_row * tiles + i_tile)
                    own = _sum_without(p_row, p_bits, vocabulary, excluded, i_tile, tile_max, scale, TILE)
                    b_own = tl.where(o_tile == i_tile, own, b_own)
                b_tiles = tiles_in_row(b_own, b_tile_max, maximum, scale)
            all_tiles = tl.sum(b_tiles, axis=0)
            purpose = tl.where(accepted < ROWS - 1, _RECOVER, _BONUS)
            x0, x1, x2, x3 = random_words(seed, position + accepted, purpose)
            b_passed = tl.cumsum(b_tiles, axis=0) <= draw_below(x0, x1, all_tiles)
            i_tile = tl.sum(b_passed.to(tl.int32), axis=0)
            # A rejection that leaves nothing to recover is one of rounding; it is answered by the argmax.
            nothing = all_tiles == 0
            i_best = tl.min(tl.where(b_tile_max == maximum, o_tile, TILES_PAD), axis=0)
            i_tile = tl.where(nothing, i_best, i_tile)
            o_drawn = i_tile * TILE + tl.arange(0, TILE)  # [TILE]
            # Without filters and drafts, tokens weigh what they did in the tile's sum.
            relative_to = tl.where(in_row, maximum, tl.load(p_tile_max + i_row * tiles + i_tile))
            b_drawn = _final_weights(
                p_row, p_bits, p_draft_row, o_drawn, vocabulary, relative_to, scale, total, threshold, last,
                excluded, residual, draft_max, draft_scale, draft_total, _ONE_IN_TILE,
            )  # fmt: skip
            b_before = tl.cumsum(b_drawn, axis=0) <= draw_below(x2, x3, tl.sum(b_drawn, axis=0))
            drawn = i_tile * TILE + tl.sum(b_before.to(tl.int32), axis=0)
            b_all = load_logits(p_row, p_bits, o_drawn, vocabulary)
            best = tl.min(tl.where(b_all == maximum, o_drawn, 2**31 - 1), axis=0)
            token = tl.where(nothing, best, drawn).to(tl.int64)
    if finishes:
        b_emitted = tl.where(o_row < accepted, b_draft, tl.where(o_row == accepted, token, -1))
        tl.store(p_emitted + i_request * stride_emitted + o_row, b_emitted, mask=m_row)
        tl.store(p_accepted + i_request, accepted.to(tl.int64))


@dataclass(frozen=True)
class VerifyWorkspace:
    """What the three launches pass on. One may serve many steps in turn, but not two streams at once.

    Attributes:
        tile_max, tile_sum: FP32 and int64 ``[N, T]``, of the tiles of N = R * (K + 1) rows.
        row_max, row_total, threshold, last: FP32, int64, FP32 and int32 ``[N]``, of the rows.
        listed, tokens: FP32 and int32 ``[N, C]``, logits and tokens that a filter's search looks at.
        listed_counts, row_arrivals: int32 ``[N]``, entries of these lists and programs that have written
            theirs; all 0 between launches.
        request_tiles: int64 ``[R, T]``, of the row that a request's last token is drawn from.
        arrivals: int32 ``[R]``, finished programs of that row; all 0 between launches.
    """

    tile_max: Tensor
    tile_sum: Tensor
    row_max: Tensor
    row_total: Tensor
    threshold: Tensor
    last: Tensor
    listed: Tensor
    tokens: Tensor
    listed_counts: Tensor
    row_arrivals: Tensor
    request_tiles: Tensor
    arrivals: Tensor

    @classmethod
    def allocate(
        cls,
        requests: int,
        num_drafts: int,
        vocabulary: int,
        device: torch.device | str = "cpu",
        max_listed: int = LISTED_TOKENS,
    ) -> VerifyWorkspace:
        """Space for up to ``requests`` requests; filters list up to ``max_listed`` tokens of a row."""
        rows, tiles = requests * (num_drafts + 1), triton.cdiv(vocabulary, TILE)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            tile_max=empty(torch.float32, rows, tiles),
            tile_sum=empty(torch.int64, rows, tiles),
            row_max=empty(torch.float32, rows),
            row_total=empty(torch.int64, rows),
            threshold=empty(torch.float32, rows),
            last=empty(torch.int32, rows),
            listed=empty(torch.float32, rows, min(max_listed, vocabulary)),
            tokens=empty(torch.int32, rows, min(max_listed, vocabulary)),
            listed_counts=torch.zeros(rows, dtype=torch.int32, device=device),
            row_arrivals=torch.zeros(rows, dtype=torch.int32, device=device),
            request_tiles=empty(torch.int64, requests, tiles),
            arrivals=torch.zeros(requests, dtype=torch.int32, device=device),
        )


def verify_triton(
    logits: Tensor,
    drafts: Tensor,
    positions: Tensor,
    params: SamplingParams,
    workspace: VerifyWorkspace,
    distributions: DraftDistributions | None = None,
    allowed: Tensor | None = None,
    accepted: Tensor | None = None,
    emitted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What :func:`~page4.kernels.mtp_verify.verify_reference` returns, bit for bit, in three launches.

    Logits, drafts, draft logits and ``allowed`` may be padded views as long as their last dimension is
    adjacent. ``accepted`` int64 ``[R]`` and ``emitted`` int64 ``[R, K + 1]`` may be given to be overwritten,
    except for padded requests, whose entries stay as they are; without them these are -1. Nothing
    synchronises with the host, and with both given nothing is allocated.

    Traffic: the logits once, and V / 8 bytes more a row with ``allowed``; rows with filters once more, as
    long as their search can list its tokens; for a request with filters or sampled drafts, one row of logits
    and one of the draft's.

    Raises:
        InputError: shapes, dtypes, devices or strides that disagree, no distributions for sampled drafts, or
            a workspace that is too small.
    """
    requests, num_drafts, vocabulary = check_verify_inputs(
        logits, drafts, positions, params, distributions, allowed
    )
    rows, tiles = num_drafts + 1, triton.cdiv(vocabulary, TILE)
    accepted = torch.full_like(positions, -1) if accepted is None else accepted
    emitted = positions.new_full((requests, rows), -1) if emitted is None else emitted
    if accepted.shape != (requests,) or accepted.dtype != torch.int64:
        raise InputError(f"accepted must be int64 [{requests}], got {accepted.dtype} {list(accepted.shape)}")
    if emitted.shape != (requests, rows) or emitted.dtype != torch.int64:
        raise InputError(
            f"emitted must be int64 {[requests, rows]}, got {emitted.dtype} {list(emitted.shape)}"
        )
    if workspace.tile_max.shape[0] < requests * rows or workspace.arrivals.shape[0] < requests:
        raise InputError(
            f"the workspace is for {workspace.arrivals.shape[0]} requests and {workspace.tile_max.shape[0]} "
            f"rows, need {requests} and {requests * rows}"
        )
    if workspace.tile_max.shape[1] != tiles:
        raise InputError(f"the workspace is for {workspace.tile_max.shape[1]} tiles a row, need {tiles}")
    stored = (None, None, None, None) if distributions is None or num_drafts == 0 else (
        distributions.logits, distributions.scale, distributions.maximum, distributions.total
    )  # fmt: skip
    check_on(
        logits.device, logits=logits, drafts=drafts, positions=positions, allowed=allowed,
        accepted=accepted, emitted=emitted, draft_logits=stored[0], draft_scale=stored[1],
        draft_maximum=stored[2], draft_total=stored[3], scale=params.scale, workspace=workspace.arrivals,
    )  # fmt: skip
    if stored[1] is not None and len({x.stride(0) for x in stored[1:] if x is not None}) > 1:
        raise InputError("scale, maximum and total of the stored distributions must have the same strides")
    if requests == 0:
        return accepted, emitted
    w = workspace
    bit_strides = (0, 0) if allowed is None else (allowed.stride(0), allowed.stride(1))
    dependent = launches_dependents(logits.device)
    launch_tile_sums(logits, positions, params.scale, allowed, None, w.tile_max, w.tile_sum)
    parts = min(_ROW_PROGRAMS, triton.cdiv(_ALL_ROW_PROGRAMS, requests * rows), tiles)
    gather_rows_kernel[(requests * rows, parts)](
        logits, logits.stride(0), logits.stride(1), positions,
        params.scale, params.top_k, params.top_p, params.log2_min_p, allowed, *bit_strides,
        w.tile_max, w.tile_sum, w.listed, w.tokens, w.listed_counts, w.row_arrivals,
        w.row_max, w.row_total, w.threshold, w.last, vocabulary, tiles,
        ROWS=rows, TILE=TILE, TILES_PAD=next_tiles(vocabulary), BT=_LIST_TILES, CAPACITY=w.listed.shape[1],
        CHUNK=min(_SEARCH_CHUNK, triton.next_power_of_2(vocabulary)), DEPENDENT=dependent,
        num_warps=_ROW_WARPS, maxnreg=MAX_REGISTERS, enable_fp_fusion=False, launch_pdl=dependent,
    )  # fmt: skip
    parts = min(triton.cdiv(tiles, _DECIDE_TILES), triton.cdiv(_DECIDE_PROGRAMS, requests))
    decide_kernel[(requests, parts)](
        logits, logits.stride(0), logits.stride(1), drafts, drafts.stride(0), positions,
        params.scale, params.top_k, params.top_p, params.log2_min_p, params.seed, allowed, *bit_strides,
        stored[0], *((0, 0) if stored[0] is None else stored[0].stride()[:2]), *stored[1:],
        0 if stored[1] is None else stored[1].stride(0),
        w.tile_max, w.tile_sum, w.row_max, w.row_total, w.threshold, w.last, w.request_tiles, w.arrivals,
        accepted, emitted, emitted.stride(0), vocabulary, tiles,
        ROWS=rows, ROWS_PAD=triton.next_power_of_2(rows), TILE=TILE, TILES_PAD=next_tiles(vocabulary),
        BT=_DECIDE_TILES, DEPENDENT=dependent,
        num_warps=_DECIDE_WARPS, maxnreg=MAX_REGISTERS, enable_fp_fusion=False, launch_pdl=dependent,
    )  # fmt: skip
    return accepted, emitted
