"""Token weights in Triton, and the one launch that reads all logits: the sums of every tile of every row.

The functions compute the bits of :mod:`~page4.kernels.token_weights`. Every kernel that calls them is
launched with ``enable_fp_fusion=False``: products and sums are fused where the definition says so alone.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError
from page4.kernels.token_weights import EXP2_COEFFICIENTS, TILE

_WARPS = 4  # a tile in each: no reduction leaves a warp
_PROGRAMS = 2048  # about twice what an H200 holds at once, so that rows that cost more spread evenly
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in EXP2_COEFFICIENTS)


@triton.jit
def load_logits(p_row, p_bits, o_token, vocabulary):
    """FP32 logits of a row; -inf for tokens that are not allowed or beyond the vocabulary."""
    m_token = o_token < vocabulary
    b_logit = tl.load(p_row + o_token, mask=m_token, other=-float("inf")).to(tl.float32)
    if p_bits is not None:
        b_word = tl.load(p_bits + o_token // 32, mask=m_token, other=0)
        b_logit = tl.where(((b_word >> (o_token % 32)) & 1) != 0, b_logit, -float("inf"))
    return b_logit


@triton.jit
def _fused_multiply_add(b_x, b_y, z):
    """FP32 ``x * y + z``, rounded once."""
    if _INTERPRETED:  # the interpreter's own would round twice
        product = b_x.to(tl.float64) * b_y.to(tl.float64)
        total = product + z
        part = total - product
        error = (product - (total - part)) + (z - part)
        bits = total.to(tl.int64, bitcast=True)
        odd = bits + tl.where((error > 0) == (total > 0), 1, -1)
        odd = tl.where((error != 0) & ((bits & 1) == 0), odd, bits)
        result = odd.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        result = tl.fma(b_x, b_y, z)
    return result


@triton.jit
def _power_of_two(b_logit, maximum, scale, ONE: tl.constexpr):
    """FP32 ``ONE * 2^((logit - maximum) * scale)``, ``ONE`` a power of two, the exponent at least -64.

    With ``ONE`` in the coefficients every rounding stays what it is. Where ``maximum`` is not finite, the
    result means nothing.
    """
    b_exponent = tl.maximum((b_logit - maximum) * scale, -64.0)
    b_shifted = b_exponent + 12582912.0
    b_f = b_exponent - (b_shifted - 12582912.0)
    b_power = _fused_multiply_add(tl.full(b_f.shape, _C5 * ONE, tl.float32), b_f, _C4 * ONE)
    b_power = _fused_multiply_add(b_power, b_f, _C3 * ONE)
    b_power = _fused_multiply_add(b_power, b_f, _C2 * ONE)
    b_power = _fused_multiply_add(b_power, b_f, _C1 * ONE)
    b_power = _fused_multiply_add(b_power, b_f, ONE)
    # The lowest bits of the shifted exponent are its integer; the others leave the word.
    b_bits = b_power.to(tl.int32, bitcast=True) + (b_shifted.to(tl.int32, bitcast=True) << 23)
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def relative_power(b_logit, maximum, scale):
    """FP32 ``2^((logit - maximum) * scale)``, at least 2^-64."""
    return _power_of_two(b_logit, maximum, scale, 1.0)


@triton.jit
def token_weights(b_logit, maximum, scale):
    """int64 weights: ``floor(2^40 * relative_power)``."""
    return _power_of_two(b_logit, maximum, scale, 1099511627776.0).to(tl.int64)


@triton.jit
def fixed_point(b_power):
    """int64 ``floor(2^40 * power)``."""
    return (b_power * 1099511627776.0).to(tl.int64)


@triton.jit
def inverse_total(total):
    """FP32 factor that turns powers of a row into probabilities."""
    return tl.where(total > 0, 1099511627776.0 / tl.maximum(total, 1).to(tl.float64), 0.0).to(tl.float32)


@triton.jit
def draw_below(high, low, limit):
    """``floor(limit * x / 2^64)``, x the 64 bits of two uint32 words."""
    return tl.umulhi((high.to(tl.uint64) << 32) | low.to(tl.uint64), limit.to(tl.uint64)).to(tl.int64)


@triton.jit
def random_words(seed, position, purpose):
    """The four uint32 words of int64 positions for one purpose, or one for each position."""
    c0 = (position & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = c0 * 0 + purpose.to(tl.uint32)
    return tl.philox(seed, c0, c1, c2, c0 * 0)


@triton.jit
def row_maximum(b_tile_max):
    """The maximum of tile maxima, and whether a row of it has a distribution."""
    maximum = tl.max(b_tile_max, axis=0)
    nan = tl.max((b_tile_max != b_tile_max).to(tl.int32), axis=0) != 0
    return maximum, (maximum > -float("inf")) & (maximum < float("inf")) & (nan == 0)


@triton.jit
def tiles_in_row(b_own, b_tile_max, maximum, scale):
    """int64 sums of tiles relative to the row's maximum, from those relative to the tiles' own."""
    b_factor = relative_power(b_tile_max, maximum, scale)
    b_tiles = (b_own.to(tl.float64) * b_factor.to(tl.float64)).to(tl.int64)
    return tl.where(b_tile_max > -float("inf"), b_tiles, 0)


@triton.jit
def _larger(b_x, b_y):
    """The larger ones, or NaN where there is one."""
    return tl.maximum(b_x, b_y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _first_equal(b_logit, b_max, o_token):
    """Tokens whose logits are their tile's maximum; INT_MAX for the others."""
    return tl.where(b_logit == b_max[:, None], o_token, 2**31 - 1)


@triton.jit
def _copy_logits(p_copy, b_logit, o_token, vocabulary):
    tl.store(p_copy + o_token, b_logit.to(p_copy.dtype.element_ty), mask=o_token < vocabulary)


@triton.jit(do_not_specialize=["turns"])
def tile_sums_kernel(
    p_logits, stride_request, stride_row, p_positions, p_scale,
    p_allowed, stride_bits_request, stride_bits_row, p_store, stride_store, p_tile_max, p_tile_sum,
    vocabulary, tiles, turns,
    ROWS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Maxima (NaN if there is one) and sums of tiles; one program takes ``turns`` times ``WARPS`` of one row.

    For a greedy request the sum is the first index of the maximum instead. The logits of a request that is
    not greedy are copied to ``p_store``, if it is given.
    """
    start_dependent(DEPENDENT)
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_request, i_member = i_row // ROWS, i_row % ROWS
    if tl.load(p_positions + i_request) < 0:
        return  # a padded request
    scale = tl.load(p_scale + i_request)
    p_row = p_logits + i_request * stride_request + i_member * stride_row
    p_bits = p_allowed
    if p_allowed is not None:
        p_bits = p_allowed + i_request * stride_bits_request + i_member * stride_bits_row
    first = i_part * turns * WARPS
    for first_tile in range(first, tl.minimum(first + turns * WARPS, tiles), WARPS):
        o_tile = first_tile + tl.arange(0, WARPS)
        # Four pieces of each tile, [WARPS, LANES]: a thread compares and adds them without its neighbours.
        o_0 = o_tile[:, None] * TILE + tl.arange(0, LANES)[None, :]
        o_1, o_2, o_3 = o_0 + LANES, o_0 + 2 * LANES, o_0 + 3 * LANES
        b_0 = load_logits(p_row, p_bits, o_0, vocabulary)
        b_1 = load_logits(p_row, p_bits, o_1, vocabulary)
        b_2 = load_logits(p_row, p_bits, o_2, vocabulary)
        b_3 = load_logits(p_row, p_bits, o_3, vocabulary)
        b_largest = _larger(_larger(b_0, b_1), _larger(b_2, b_3))
        b_max = tl.max(b_largest, axis=1)  # [WARPS], without NaN
        b_nan = tl.max((b_largest != b_largest).to(tl.int32), axis=1) != 0
        if scale == 0.0:
            b_low = tl.minimum(_first_equal(b_0, b_max, o_0), _first_equal(b_1, b_max, o_1))
            b_high = tl.minimum(_first_equal(b_2, b_max, o_2), _first_equal(b_3, b_max, o_3))
            b_sum = tl.min(tl.minimum(b_low, b_high), axis=1).to(tl.int64)
        else:
            b_weight = token_weights(b_0, b_max[:, None], scale)
            b_weight += token_weights(b_1, b_max[:, None], scale)
            b_weight += token_weights(b_2, b_max[:, None], scale)
            b_weight += token_weights(b_3, b_max[:, None], scale)
            b_sum = tl.sum(b_weight, axis=1)
            if p_store is not None:
                p_copy = p_store + i_request * stride_store
                _copy_logits(p_copy, b_0, o_0, vocabulary)
                _copy_logits(p_copy, b_1, o_1, vocabulary)
                _copy_logits(p_copy, b_2, o_2, vocabulary)
                _copy_logits(p_copy, b_3, o_3, vocabulary)
        o_out = i_row * tiles + o_tile
        tl.store(p_tile_max + o_out, tl.where(b_nan, float("nan"), b_max), mask=o_tile < tiles)
        tl.store(p_tile_sum + o_out, b_sum, mask=o_tile < tiles)


def launch_tile_sums(
    logits: Tensor,
    positions: Tensor,
    scale: Tensor,
    allowed: Tensor | None,
    store: Tensor | None,
    tile_max: Tensor,
    tile_sum: Tensor,
) -> None:
    """Sums of the tiles of logits ``[R, rows, V]`` into ``[R * rows, T]``; inputs are checked already."""
    requests, rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, TILE)
    all_turns = triton.cdiv(tiles, _WARPS)  # of a row
    turns = triton.cdiv(all_turns, triton.cdiv(_PROGRAMS, requests * rows))
    dependent = launches_dependents(logits.device)
    tile_sums_kernel[(requests * rows, triton.cdiv(all_turns, turns))](
        logits, logits.stride(0), logits.stride(1), positions, scale,
        allowed, *((0, 0) if allowed is None else allowed.stride()[:2]),
        store, 0 if store is None else store.stride(0), tile_max, tile_sum, vocabulary, tiles, turns,
        ROWS=rows, TILE=TILE, LANES=TILE // 4, WARPS=_WARPS, DEPENDENT=dependent,
        # Six programs fit a multiprocessor so; what else there is would spill.
        maxnreg=80 if dependent and allowed is None and logits.element_size() == 2 else None,
        num_warps=_WARPS, enable_fp_fusion=False, launch_pdl=dependent,
    )  # fmt: skip


def next_tiles(vocabulary: int) -> int:
    """Tiles of a row, rounded up to a power of two."""
    return triton.next_power_of_2(triton.cdiv(vocabulary, TILE))


def check_on(device: torch.device, **tensors: Tensor | None) -> None:
    """Refuse tensors on other devices, and those whose last dimension is not adjacent."""
    for name, x in tensors.items():
        if x is None:
            continue
        if x.device != device:
            raise InputError(f"{name} is on {x.device}, the logits are on {device}")
        if x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise InputError(f"the last dimension of {name} must be adjacent, its stride is {x.stride(-1)}")
