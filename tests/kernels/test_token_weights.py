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
    exponent_base,
    fused_multiply_add,
    inverse_total,
    pick,
    pick_in_tiles,
    power_of_two,
    relative_exponents,
    row_totals,
    summed_powers,
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
    assert weight[0, 0] == weight[0, 3] == 0
    assert float(weight[0, 1]) / ONE == pytest.approx(1, rel=2**-20)  # two units of 4.33's last place
    assert float(weight[0, 2] / weight[0, 1]) == pytest.approx(math.exp(-1), rel=1e-6)


def test_exponents_are_bounded() -> None:
    logits = torch.tensor([math.inf, 1.0, 0.9, -1e30, -math.inf, math.nan])
    exponent = relative_exponents(logits, torch.tensor(1.0), torch.tensor(2.0))
    assert exponent[0] == 0 and -(2**-21) < exponent[1] <= 0 and exponent[2] == pytest.approx(-0.2, rel=1e-5)
    assert exponent[3:5].tolist() == [-64, -64]
    none = relative_exponents(logits[4:5], logits[4:5], torch.tensor(2.0))
    assert none.item() == -64


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_probabilities_are_those_of_a_softmax_in_float64(temperature: float) -> None:
    """But for the rounding of an exponent, half a unit in its last place, and of FP32 powers and sums."""
    logits = 5 * torch.randn(4, 5 * TILE + 3, generator=torch.Generator().manual_seed(0))
    scale = torch.full((4, 1), math.log2(math.e) / temperature)
    totals = row_totals(logits, scale[:, 0])
    power = power_of_two(relative_exponents(logits, totals.maximum[:, None], scale))
    found = (power * inverse_total(totals.total)[:, None]).double()
    exponent = (logits.double() - logits.double().amax(1, True)) * scale.double()
    expected = exponent.exp2() / exponent.exp2().sum(1, True)
    seen = exponent > -60  # below, exponents end
    rounding = math.log(2) * 2.0**-24 * -exponent
    assert ((found / expected - 1).abs() <= rounding + 6e-7)[seen].all()
    likely = exponent > -8
    assert likely.sum() > 10 and ((found / expected - 1).abs() < 1e-6)[likely].all()


@pytest.mark.parametrize("vocabulary", [1, TILE - 1, TILE, 5 * TILE + 3])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_totals_are_sums_of_exponentials(vocabulary: int, temperature: float) -> None:
    logits = 5 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    scale = torch.full((3,), math.log2(math.e) / temperature)
    totals = row_totals(logits, scale)
    base = exponent_base(totals.maximum, scale)
    exact = (logits.double() * scale[:, None].double() - base[:, None].double()).exp2().sum(1)
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


def test_a_token_that_is_left_out_weighs_nothing_and_the_base_stays() -> None:
    logits = torch.randn(2, 2 * TILE + 5, generator=torch.Generator().manual_seed(0))
    logits[:, TILE + 9] = 5.0
    whole = row_totals(logits, torch.ones(2))
    without = whole.tiles_without(torch.tensor([TILE + 9, -1]))
    changed = whole.tiles != without
    assert changed.tolist() == [[False, True, False], [False] * 3]
    assert float(whole.tiles[0, 1] - without[0, 1]) == pytest.approx(ONE, rel=2**-20)


def test_a_tile_that_weighs_something_has_a_token_that_does() -> None:
    """Also where each of 16 powers alone is below 2^-40: its most probable token is left out."""
    logits = torch.full((1, TILE), -40.5)
    logits[0, 7] = 0.0
    totals = row_totals(logits, torch.ones(1))
    tiles = totals.tiles_without(torch.tensor([7]))
    own = totals.own_weights(TILE) * (torch.arange(TILE) != 7)
    assert 0 < tiles.item() < TILE and (own[0] > 0).sum() == TILE - 1


@pytest.mark.parametrize("vocabulary", [5, 256, 300, TILE])
def test_a_narrow_tile_is_summed_as_a_whole_one(vocabulary: int) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(logits, (0, TILE - vocabulary), value=-math.inf)
    narrow, whole = (row_totals(x, torch.ones(3)).power for x in (logits, padded))
    assert torch.equal(summed_powers(narrow), summed_powers(whole))


def test_picks_are_the_first_ends_above_the_number() -> None:
    weight = torch.tensor([[0, 1, 0, 2, 1]]).expand(4, -1) << 40
    words = torch.tensor([[0, 0], [2**30, 0], [2**31 + 2**30 - 1, 2**32 - 1], [2**31 + 2**30, 0]])
    assert pick(weight, words).tolist() == [1, 3, 3, 4]


def test_two_steps_draw_a_tile_and_a_token_in_it() -> None:
    logits = torch.full((1, 3 * TILE), -math.inf)
    logits[0, [5, TILE + 7, 3 * TILE - 1]] = torch.tensor([0.0, 1.0, 2.0])
    totals = row_totals(logits, torch.ones(1))
    own, tiles = totals.own_weights(3 * TILE), totals.tiles  # 1/7, 2/7, 4/7
    step = 2**32 / 7
    for share, token in (
        (0.5, 5),
        (1.5, TILE + 7),
        (2.5, TILE + 7),
        (3.5, 3 * TILE - 1),
        (6.9, 3 * TILE - 1),
    ):
        assert pick_in_tiles(tiles, own, torch.tensor([[int(share * step), 0, 2**31, 0]])).tolist() == [token]
