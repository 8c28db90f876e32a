"""Weights of tokens: accuracy, sums in tiles, drawing in proportion."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from page4.kernels.token_weights import (
    EXP2_COEFFICIENTS,
    ONE,
    TILE,
    fused_multiply_add,
    pick,
    pick_in_tiles,
    power_of_two,
    row_totals,
    tile_weights,
    weights,
)


def test_powers_of_two_are_near_the_exact_ones() -> None:
    exponent = -torch.linspace(0, 64, 1_000_001)
    exact = torch.exp2(exponent.double())
    assert ((power_of_two(exponent).double() / exact - 1).abs() < 2e-7).all()
    whole = -torch.arange(65.0)
    assert torch.equal(power_of_two(whole), torch.exp2(whole))


def test_a_fused_step_rounds_once() -> None:
    """Exactly as rational numbers say, also where float64 would land on the middle of two FP32 numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(500, generator=generator) + 0.5
    y = torch.rand(500, generator=generator) - 0.5
    # A hair above and below the middle of 1 and its neighbours.
    hard = [(1 + 2**-12, 2**-24 * (1 - 2**-12 + 2**-23)), (1 + 2**-12, -(2**-25) * (1 - 2**-12))]
    x[: len(hard)], y[: len(hard)] = torch.tensor(hard).unbind(1)
    for z in (1.0, -1.0, 12582912.0, EXP2_COEFFICIENTS[0]):
        found = fused_multiply_add(x, y, z)
        for a, b, result in zip(x.tolist(), y.tolist(), found, strict=True):
            exact = Fraction(a) * Fraction(b) + Fraction(z)
            near = [torch.nextafter(result, torch.tensor(end)) for end in (-math.inf, math.inf)]
            distance = abs(Fraction(result.item()) - exact)
            others = [abs(Fraction(other.item()) - exact) for other in near]
            assert distance <= min(others)
            even = int(result.view(torch.int32)) % 2 == 0
            assert distance < min(others) or even


def test_the_most_probable_token_weighs_one_and_excluded_ones_nothing() -> None:
    logits = torch.tensor([[-math.inf, 3.0, 2.0, -40.0]])
    weight = weights(logits, torch.tensor([[3.0]]), torch.tensor([[math.log2(math.e)]]))
    assert weight[0, 1] == ONE and weight[0, 0] == weight[0, 3] == 0
    assert float(weight[0, 2]) / ONE == pytest.approx(math.exp(-1), rel=1e-6)


@pytest.mark.parametrize("vocabulary", [1, TILE - 1, TILE, 5 * TILE + 3])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_totals_are_sums_of_exponentials(vocabulary: int, temperature: float) -> None:
    logits = 5 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    totals = row_totals(logits, torch.full((3,), math.log2(math.e) / temperature))
    exact = ((logits.double() - logits.amax(1, True)) / temperature).exp().sum(1)
    torch.testing.assert_close(totals.total.double() / ONE, exact, rtol=1e-6, atol=0)
    assert torch.equal(totals.total, totals.tiles.sum(1))
    assert torch.equal(totals.maximum, logits.amax(1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_a_distribution_have_no_total(bad: float) -> None:
    logits = torch.zeros(3, TILE + 5)
    logits[0, TILE + 2] = bad
    logits[1] = -math.inf
    assert row_totals(logits, torch.ones(3)).total.tolist()[:2] == [0, 0]
    assert row_totals(logits, torch.ones(3)).total[2] == (TILE + 5) * ONE


def test_picks_are_the_first_ends_above_the_number() -> None:
    weight = torch.tensor([[0, 1, 0, 2, 1]]).expand(4, -1) << 40
    words = torch.tensor([[0, 0], [2**30, 0], [2**31 + 2**30 - 1, 2**32 - 1], [2**31 + 2**30, 0]])
    assert pick(weight, words).tolist() == [1, 3, 3, 4]


def test_two_steps_draw_a_tile_and_a_token_in_it() -> None:
    logits = torch.full((1, 3 * TILE), -math.inf)
    logits[0, [5, TILE + 7, 3 * TILE - 1]] = torch.tensor([0.0, 1.0, 2.0])
    own = tile_weights(logits, torch.ones(1))
    tiles = row_totals(logits, torch.ones(1), own).tiles  # 1/7, 2/7, 4/7
    step = 2**32 / 7
    for share, token in (
        (0.5, 5),
        (1.5, TILE + 7),
        (2.5, TILE + 7),
        (3.5, 3 * TILE - 1),
        (6.9, 3 * TILE - 1),
    ):
        assert pick_in_tiles(tiles, own, torch.tensor([[int(share * step), 0, 2**31, 0]])).tolist() == [token]
