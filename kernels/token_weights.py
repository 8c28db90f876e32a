"""Probabilities of tokens as integers, so that their sums are the same in every order and on every device.

A token's weight is ``floor(2^40 * 2^((logit - m) * scale))``, with ``scale = log2(e) / temperature`` and a
maximum ``m``. The power of two comes from a polynomial in FP32, whose steps are a product and a sum with one
rounding (fused, as every GPU has them); all else is rounded by itself. So PyTorch and a GPU compute the same
bits. A token below 2^-40 of the most probable one
weighs nothing.

A row of logits is cut into tiles of ``TILE`` tokens. A tile's own sum is relative to its own maximum, so that
logits are read once; the row's sum adds them up, each times the weight of its maximum in the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.philox import below

TILE = 1024  # part of the definition: another tile rounds differently
ONE = 2.0**40  # the weight of the most probable token
# 2^f = 1 + f * (c1 + f * (c2 + ...)) for |f| <= 1/2, relative error below 2e-7 in FP32.
EXP2_COEFFICIENTS = (
    0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149,
)  # fmt: skip
_ROUNDING = 12582912.0  # 1.5 * 2^23: adding it rounds an FP32 number to an integer, held in the lowest bits
_ROUNDING_BITS = 0x4B400000
_LEAST_EXPONENT = -64.0


def relative_exponents(logits: Tensor, maximum: Tensor, scale: Tensor) -> Tensor:
    """``(logits - maximum) * scale`` in FP32, at least -64; a logit of -inf has -64. Shapes broadcast."""
    exponent = (logits.float() - maximum) * scale
    return torch.where(logits > -torch.inf, exponent, _LEAST_EXPONENT).clamp_min(_LEAST_EXPONENT)


def fused_multiply_add(x: Tensor, y: Tensor, z: float) -> Tensor:
    """FP32 ``x * y + z`` of FP32 tensors, rounded once; for results that are not subnormal."""
    product = x.double() * y.double()  # exact: 48 bits
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)  # what the sum lost, exactly (Knuth's two-sum)
    # A sum in float64 that is rounded to odd can be rounded again to FP32 without harm (Boldo and Melquiond,
    # Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd, 2008).
    bits = total.view(torch.int64)
    odd = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
    return torch.where((error != 0) & (bits & 1 == 0), odd, bits).view(torch.float64).float()


def power_of_two(exponent: Tensor) -> Tensor:
    """FP32 ``2^exponent`` for FP32 exponents in [-64, 0]: the same bits everywhere."""
    shifted = exponent + _ROUNDING
    f = exponent - (shifted - _ROUNDING)
    power = torch.full_like(f, EXP2_COEFFICIENTS[-1])
    for coefficient in (*EXP2_COEFFICIENTS[-2::-1], 1.0):
        power = fused_multiply_add(power, f, coefficient)
    whole = shifted.contiguous().view(torch.int32) - _ROUNDING_BITS
    return (power.view(torch.int32) + (whole << 23)).view(torch.float32)


def weights(logits: Tensor, maximum: Tensor, scale: Tensor) -> Tensor:
    """int64 weights relative to ``maximum``; 0 where it is infinite or NaN."""
    value = power_of_two(relative_exponents(logits, maximum, scale))
    return torch.where(maximum.isfinite(), value * ONE, 0.0).long()


@dataclass(frozen=True)
class RowTotals:
    """Rows of logits, summed up.

    Attributes:
        maximum: FP32 ``[N]``; NaN where an eligible logit is NaN.
        tile_maximum: FP32 ``[N, T]``.
        tiles: int64 ``[N, T]``, sums of weights relative to the row's maximum.
        total: int64 ``[N]``. 0: the row has no distribution (no eligible token, or a NaN or +inf among them).
    """

    maximum: Tensor
    tile_maximum: Tensor
    tiles: Tensor
    total: Tensor


def in_tiles(x: Tensor, beyond: float) -> Tensor:
    """``[N, V]`` as ``[N, T, TILE]``, with ``beyond`` behind the last token; a single tile stays as it is."""
    if x.shape[1] <= TILE:
        return x[:, None]
    missing = -x.shape[1] % TILE
    return torch.nn.functional.pad(x, (0, missing), value=beyond).unflatten(1, (-1, TILE))


def tile_weights(logits: Tensor, scale: Tensor) -> Tensor:
    """int64 weights ``[N, V]`` of logits, each relative to the maximum of its own tile; scales ``[N]``."""
    tiles = in_tiles(logits.float(), -torch.inf)
    return weights(tiles, tiles.amax(2, keepdim=True), scale[:, None, None]).flatten(1)[:, : logits.shape[1]]


def row_totals(logits: Tensor, scale: Tensor, own: Tensor | None = None) -> RowTotals:
    """Sums over logits ``[N, V]`` (excluded tokens: -inf) under FP32 scales ``[N]``.

    ``own`` are the tokens' weights in their tiles (:func:`tile_weights`, the default), or some of them with
    0 for the others.
    """
    own = tile_weights(logits, scale) if own is None else own
    tile_maximum = in_tiles(logits.float(), -torch.inf).amax(2)
    maximum = tile_maximum.amax(1, keepdim=True)
    factor = power_of_two(relative_exponents(tile_maximum, maximum, scale[:, None]))
    tiles = (tile_sums(own).double() * factor.double()).long()
    tiles = torch.where(maximum.isfinite(), tiles, 0)
    return RowTotals(maximum[:, 0], tile_maximum, tiles, tiles.sum(1))


def tile_sums(weight: Tensor) -> Tensor:
    """Sums of ``[N, V]`` over the tiles, ``[N, T]``."""
    return in_tiles(weight, 0).sum(2)


def inverse_total(total: Tensor) -> Tensor:
    """FP32 factor of a row's powers of two that makes probabilities, for int64 totals; 0 for 0."""
    return torch.where(total > 0, ONE / total.clamp_min(1).double(), 0.0).float()


def pick(weight: Tensor, words: Tensor) -> Tensor:
    """Index drawn in proportion to int64 weights ``[N, V]``, from two random words ``[N, 2]``: int64 ``[N]``.

    The first index whose cumulative weight exceeds :func:`~page4.kernels.philox.below` of the total.
    """
    ends = weight.cumsum(1)
    return (ends <= below(words, ends[:, -1])[:, None]).sum(1)


def pick_in_tiles(tiles: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """Token drawn in two steps: a tile by ``tiles`` ``[N, T]``, then one of it by ``weight`` ``[N, V]``.

    Each step takes two of the four random words ``[N, 4]``. Rows whose ``tiles`` are all 0 give no token that
    means anything.
    """
    tile = pick(tiles, words[:, :2]).clamp_max(tiles.shape[1] - 1)
    row = torch.arange(len(tile), device=tile.device)
    return tile * TILE + pick(in_tiles(weight, 0)[row, tile], words[:, 2:])
