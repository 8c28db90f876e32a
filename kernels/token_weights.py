"""Probabilities of tokens as integers, so that their sums are the same in every order and on every device.

A token's weight is ``floor(2^40 * 2^x)`` with the exponent ``x = logit * scale - base``, rounded once, and
``scale = log2(e) / temperature``. The base of a maximum ``m`` is the rounded ``m * scale``, raised by a hair:
no exponent is above 0, and that of the most probable token is hardly below. The power of two comes from a
polynomial in FP32, whose steps are a product and a sum with one rounding (fused, as every GPU has them); all
else is rounded by itself. So PyTorch and a GPU compute the same bits. A token below 2^-40 of the most
probable one weighs nothing.

A row of logits is cut into tiles of ``TILE`` tokens. A tile's own sum is relative to its own maximum, so that
logits are read once: 16 powers each are summed in FP32, in a fixed order, and the 64 sums of a tile as
integers. The row's sum adds up those of tiles, each times the power of two of its base in the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.philox import below

TILE = 1024  # part of the definition: another tile rounds differently
LANES = TILE // 4
ONE = 2.0**40  # the weight of the most probable token
# Among the tokens of one tile. So one of them weighs something wherever 16 powers together do.
ONE_IN_TILE = 2.0**52
# 2^f = 1 + f * (c1 + f * (c2 + ...)) for |f| <= 1/2, relative error below 2e-7 in FP32.
EXP2_COEFFICIENTS = (
    0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149,
)  # fmt: skip
_ROUNDING = 12582912.0  # 1.5 * 2^23: adding it rounds an FP32 number to an integer, held in the lowest bits
_ROUNDING_BITS = 0x4B400000
_RANGE = 64.0  # of exponents
LEAST_POWER = 2.0**-_RANGE  # of a logit of -inf, too


def exponent_base(maximum: Tensor, scale: Tensor) -> Tensor:
    """FP32 just above ``maximum * scale``, which exponents are relative to; 0 for a maximum of -inf."""
    product = maximum * scale
    return torch.where(maximum > -torch.inf, product + product.abs() * 2.0**-23, 0.0)


def relative_exponents(logits: Tensor, maximum: Tensor, scale: Tensor) -> Tensor:
    """FP32 ``logit * scale - base``, from -64 to 0, and -64 for a logit of -inf. Shapes broadcast."""
    base = exponent_base(maximum, scale)
    missing = fused_multiply_add(logits.float(), scale / -_RANGE, base / _RANGE)  # as a share of the range
    return missing.nan_to_num(0.0).clamp(0.0, 1.0) * -_RANGE


def fused_multiply_add(x: Tensor, y: Tensor, z: Tensor | float) -> Tensor:
    """FP32 ``x * y + z`` of FP32 tensors, rounded once."""
    product = x.double() * y.double()  # exact: 48 bits
    z = z.double() if isinstance(z, Tensor) else z
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)  # what the sum lost, exactly (Knuth's two-sum)
    # A sum in float64 that is rounded to odd can be rounded again to FP32 without harm (Boldo and Melquiond,
    # Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd, 2008).
    bits = total.view(torch.int64)
    odd = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
    inexact = (error > 0) | (error < 0)  # and not NaN, as it is of infinite sums
    return torch.where(inexact & (bits & 1 == 0), odd, bits).view(torch.float64).float()


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
        power: FP32 ``[N, T, TILE]``, 2^x of every token relative to its tile's maximum.
        factor: FP32 ``[N, T]``, that of a tile's base in the row; 0 where there is no distribution.
        tiles: int64 ``[N, T]``, sums of weights relative to the row's maximum.
        total: int64 ``[N]``. 0: the row has no distribution (no eligible token, or a NaN or +inf among them).
    """

    maximum: Tensor
    tile_maximum: Tensor
    power: Tensor
    factor: Tensor
    tiles: Tensor
    total: Tensor

    def own_weights(self, vocabulary: int) -> Tensor:
        """int64 ``[N, V]``: what tokens weigh among those of their tile, ``ONE_IN_TILE`` for a power of 1."""
        return (self.power.flatten(1)[:, :vocabulary] * ONE_IN_TILE).long()

    def tiles_without(self, token: Tensor) -> Tensor:
        """``tiles`` if one token of each row, int64 ``[N]`` (-1: none), had the least power."""
        tokens = torch.arange(self.power[0].numel(), device=token.device).view_as(self.power[0])
        return _in_row(self.power.masked_fill(tokens == token[:, None, None], LEAST_POWER), self.factor)


def in_tiles(x: Tensor, beyond: float) -> Tensor:
    """``[N, V]`` as ``[N, T, TILE]``, with ``beyond`` behind the last token; a single tile stays as it is."""
    if x.shape[1] <= TILE:
        return x[:, None]
    missing = -x.shape[1] % TILE
    return torch.nn.functional.pad(x, (0, missing), value=beyond).unflatten(1, (-1, TILE))


def row_totals(logits: Tensor, scale: Tensor) -> RowTotals:
    """Sums over logits ``[N, V]`` (excluded tokens: -inf) under FP32 scales ``[N]``."""
    tiles = in_tiles(logits.float(), -torch.inf)
    tile_maximum = tiles.amax(2)
    maximum = tile_maximum.amax(1, keepdim=True)
    power = power_of_two(relative_exponents(tiles, tile_maximum[..., None], scale[:, None, None]))
    exponent = exponent_base(tile_maximum, scale[:, None]) - exponent_base(maximum, scale[:, None])
    factor = power_of_two(exponent.nan_to_num(0.0).clamp(-_RANGE, 0.0))
    factor = torch.where(maximum.isfinite() & (tile_maximum > -torch.inf), factor, 0.0)
    weight = _in_row(power, factor)
    return RowTotals(maximum[:, 0], tile_maximum, power, factor, weight, weight.sum(1))


def _in_row(power: Tensor, factor: Tensor) -> Tensor:
    return (summed_powers(power).double() * factor.double()).long()


def summed_powers(power: Tensor) -> Tensor:
    """int64 weights of tiles, ``[N, T]``, from the powers of their tokens, ``[N, T, up to TILE]``.

    A tile is four pieces of ``LANES``; tokens that are not there have the least power. Those of four lanes
    side by side of all pieces are summed first.
    """
    if power.shape[2] <= LANES:
        first = torch.nn.functional.pad(power, (0, -power.shape[2] % 4), value=LEAST_POWER)
        lanes = (first + LEAST_POWER) + 2 * LEAST_POWER
    else:
        whole = torch.nn.functional.pad(power, (0, TILE - power.shape[2]), value=LEAST_POWER)
        a, b, c, d = whole.unflatten(2, (4, LANES)).unbind(2)
        lanes = (a + b) + (c + d)
    a, b, c, d = lanes.unflatten(2, (-1, 4)).unbind(3)
    return (((a + b) + (c + d)) * ONE).long().sum(2)


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
