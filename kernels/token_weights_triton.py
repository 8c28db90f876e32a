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
from page4.kernels.token_weights import EXP2_COEFFICIENTS, ONE, TILE

_PROGRAMS = 8192  # of a warp; about twice what an H200 holds at once, so that costly rows spread evenly
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_ONE = tl.constexpr(ONE)
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
        odd = tl.where(((error > 0) | (error < 0)) & ((bits & 1) == 0), odd, bits)  # not where it is NaN
        result = odd.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        result = tl.fma(b_x, b_y, z)
    return result


@triton.jit
def _fused_and_saturated(b_x, y, z):
    """FP32 ``x * y + z``, rounded once, not below 0 nor above 1; 0 for NaN."""
    if _INTERPRETED:
        total = _fused_multiply_add(b_x, y, z)
        result = tl.minimum(tl.maximum(tl.where(total == total, total, 0.0), 0.0), 1.0)
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [b_x, y, z], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def exponent_base(maximum, scale):
    """FP32 just above ``maximum * scale``, which exponents are relative to; 0 for a maximum of -inf."""
    product = maximum * scale
    return tl.where(maximum > -float("inf"), product + tl.abs(product) * 2.0**-23, 0.0)


@triton.jit
def _missing(b_logit, base, scale):
    """A 64th of how far exponents lie below the base, from 0 to 1: so that bounds cost nothing."""
    return _fused_and_saturated(b_logit, scale * (-1 / 64), base * (1 / 64))


@triton.jit
def relative_exponent(b_logit, maximum, scale):
    """FP32 ``logit * scale - base`` from -64 to 0, of the base of a maximum."""
    return _missing(b_logit, exponent_base(maximum, scale), scale) * -64.0


@triton.jit
def _power_of_two(b_missing, ONE: tl.constexpr):
    """FP32 ``ONE * 2^(-64 * missing)``. ``ONE`` is a power of two: in the coefficients it changes no bit."""
    b_shifted = tl.fma(b_missing, -64.0, 12582912.0)  # a product by a power of two is not rounded
    b_f = tl.fma(b_missing, -64.0, 12582912.0 - b_shifted)
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
    """FP32 ``2^relative_exponent``."""
    return _power_of_two(_missing(b_logit, exponent_base(maximum, scale), scale), 1.0)


@triton.jit
def token_weights(b_logit, maximum, scale):
    """int64 weights: ``floor(2^40 * relative_power)``."""
    return _power_of_two(_missing(b_logit, exponent_base(maximum, scale), scale), _ONE).to(tl.int64)


@triton.jit
def fixed_point(b_power, ONE: tl.constexpr):
    """int64 ``floor(ONE * power)``."""
    return (b_power * ONE).to(tl.int64)


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
    b_exponent = exponent_base(b_tile_max, scale) - exponent_base(maximum, scale)
    b_factor = _power_of_two(tl.minimum(tl.maximum(b_exponent * (-1 / 64), 0.0), 1.0), 1.0)
    b_tiles = (b_own.to(tl.float64) * b_factor.to(tl.float64)).to(tl.int64)
    return tl.where(b_tile_max > -float("inf"), b_tiles, 0)


@triton.jit
def _larger(b_x, b_y, PAIRS: tl.constexpr):
    """The larger ones, or NaN where there is one; ``PAIRS``: of FP16 numbers, two in one instruction."""
    if PAIRS and not _INTERPRETED:
        result = tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [b_x, b_y], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        result = tl.maximum(b_x, b_y, propagate_nan=tl.PropagateNan.ALL)
    return result


@triton.jit
def _pieces(b_x):
    """The four quarters of a tile, which a thread holds parts of each of: nothing moves."""
    b_x = tl.trans(tl.reshape(b_x, [4, b_x.numel // 4]))
    b_even, b_odd = tl.split(tl.reshape(b_x, [b_x.shape[0], 2, 2]))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_0, b_1, b_2, b_3


@triton.jit
def _halves(b_x, N: tl.constexpr):
    """Of every N adjacent elements the first half and the second; with N > 2, pairs stay together."""
    b_x = tl.reshape(b_x, [b_x.shape[0] // N, 2, N // 2])
    b_first, b_second = tl.split(tl.permute(b_x, (0, 2, 1)))
    size: tl.constexpr = b_x.numel // 2
    return tl.reshape(b_first, [size]), tl.reshape(b_second, [size])


@triton.jit
def _maximum(b_logit, PAIRS: tl.constexpr):
    """The FP32 maximum of a tile, or NaN; what a thread holds of 16-bit logits is compared there."""
    b_0, b_1, b_2, b_3 = _pieces(b_logit)
    b_max = _larger(_larger(b_0, b_1, PAIRS), _larger(b_2, b_3, PAIRS), PAIRS)
    b_first, b_second = _halves(b_max, 8)
    b_first, b_second = _halves(_larger(b_first, b_second, PAIRS), 4)
    b_first, b_second = _halves(_larger(b_first, b_second, PAIRS).to(tl.float32), 2)
    b_max = _larger(b_first, b_second, False)
    # As integers, which a warp compares in one instruction.
    bits = b_max.to(tl.int32, bitcast=True)
    key = tl.max(tl.where(b_max == b_max, bits ^ ((bits >> 31) & 0x7FFFFFFF), 2**31 - 1), axis=0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tile_sum(b_logit, maximum, scale):
    """int64 weight of a tile's FP32 logits, in any shape, relative to a maximum."""
    b_power = _power_of_two(_missing(b_logit, exponent_base(maximum, scale), scale), _ONE)
    b_0, b_1, b_2, b_3 = _pieces(b_power)
    b_even, b_odd = _halves((b_0 + b_1) + (b_2 + b_3), 2)
    b_even, b_odd = _halves(b_even + b_odd, 2)
    b_weight = (b_even + b_odd).to(tl.int64)
    # In two parts of 32 bits, which a warp sums in one instruction each.
    low = tl.sum((b_weight & 0xFFFFFF).to(tl.int32), axis=0)
    high = tl.sum((b_weight >> 24).to(tl.int32), axis=0)
    return (high.to(tl.int64) << 24) + low


@triton.jit
def _load_tile(p_row, i_tile, o_token, vocabulary, TILE: tl.constexpr):
    """Logits of a tile in their own dtype, -inf beyond the vocabulary; only its last tile needs a mask."""
    p_tile = p_row + i_tile * TILE + o_token
    left = vocabulary - i_tile * TILE
    if left >= TILE:  # noqa: SIM108 -- a branch, of which one side is run
        b_logit = tl.load(p_tile)
    else:
        b_logit = tl.load(p_tile, mask=o_token < left, other=-float("inf"))
    return b_logit


@triton.jit
def _allowed_in_tile(p_bits, i_tile, vocabulary, TILE: tl.constexpr):
    """Whether tokens ``[4, TILE // 4]`` of a tile are allowed; every word of bits is loaded once."""
    o_word = i_tile * (TILE // 32) + tl.arange(0, TILE // 32)
    b_word = tl.load(p_bits + o_word, mask=o_word * 32 < vocabulary, other=0)
    b_bit = (b_word[:, None] >> tl.arange(0, 32)[None, :]) & 1
    return tl.reshape(b_bit, [4, TILE // 4]) != 0


@triton.jit(do_not_specialize=["turns"])
def tile_sums_kernel(
    p_logits, stride_request, stride_row, p_positions, p_scale,
    p_allowed, stride_bits_request, stride_bits_row, p_store, stride_store, p_tile_max, p_tile_sum,
    vocabulary, tiles, turns,
    ROWS: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Maxima (NaN if there is one) and sums of tiles; one program takes ``turns`` of one row.

    For a greedy request the sum is the first index of the maximum instead. The logits of a request that is
    not greedy are copied to ``p_store``, if it is given. ``PAIRS``: the logits are FP16, and maxima are taken
    two numbers at a time.

    Variants measured on an H200, whole verifications of 64 x 4 sampling rows of 248,320 FP16 logits: 52.2 us
    with tiles of one dimension that are loaded and summed in turn, 49.3 with tiles of four rows, 47.9 with
    loads ahead, 47.0 with pairs, 46.4 with a mask in a row's last tile alone. This kernel, which has masks of
    allowed tokens and copies, too: 45.8, 67 % of a copy's bandwidth; 37.2 (82 %) where requests are greedy.
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
    # As four rows, which are the pieces: in one dimension pairs are taken apart and packed again.
    o_token = (tl.arange(0, 4) * (TILE // 4))[:, None] + tl.arange(0, TILE // 4)[None, :]
    first, end = i_part * turns, tl.minimum((i_part + 1) * turns, tiles)
    b_next = _load_tile(p_row, first, o_token, vocabulary, TILE)
    for i_tile in tl.range(first, end, num_stages=1):
        b_tile = b_next
        # Behind the last tile comes itself again, from a cache: cheaper than a branch.
        b_next = _load_tile(p_row, tl.minimum(i_tile + 1, end - 1), o_token, vocabulary, TILE)
        if not PAIRS:
            b_tile = b_tile.to(tl.float32)
        if p_allowed is not None:
            m_allowed = _allowed_in_tile(p_bits, i_tile, vocabulary, TILE)
            b_tile = tl.where(m_allowed, b_tile, -float("inf"))
        maximum = _maximum(b_tile, PAIRS)
        b_logit = b_tile.to(tl.float32)
        if scale == 0.0:
            b_index = tl.where(b_logit == maximum, i_tile * TILE + o_token, 2**31 - 1)
            total = tl.min(tl.min(b_index, axis=0), axis=0).to(tl.int64)
        else:
            total = tile_sum(b_logit, maximum, scale)
            if p_store is not None:
                p_copy = p_store + i_request * stride_store + i_tile * TILE + o_token
                m_copy = i_tile * TILE + o_token < vocabulary
                tl.store(p_copy, b_logit.to(p_copy.dtype.element_ty), mask=m_copy)
        tl.store(p_tile_max + i_row * tiles + i_tile, maximum)
        tl.store(p_tile_sum + i_row * tiles + i_tile, total)


def _compares_pairs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether maxima are taken two FP16 numbers at a time: one instruction from compute capability 8.0 on."""
    on_gpu = dtype == torch.float16 and device.type == "cuda"
    return on_gpu and torch.cuda.get_device_capability(device) >= (8, 0)


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
    turns = triton.cdiv(tiles, triton.cdiv(_PROGRAMS, requests * rows))
    dependent = launches_dependents(logits.device)
    tile_sums_kernel[(requests * rows, triton.cdiv(tiles, turns))](
        logits, logits.stride(0), logits.stride(1), positions, scale,
        allowed, *((0, 0) if allowed is None else allowed.stride()[:2]),
        store, 0 if store is None else store.stride(0), tile_max, tile_sum, vocabulary, tiles, turns,
        ROWS=rows, TILE=TILE, PAIRS=_compares_pairs(logits.dtype, logits.device), DEPENDENT=dependent,
        num_warps=1, enable_fp_fusion=False, launch_pdl=dependent,
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
