"""Noise in place of rounding, and another run's choice of blocks."""

from __future__ import annotations

import pytest
import torch

from page4.experiments.attribution.interventions import (
    ChoiceRecorder,
    ChoiceReplay,
    GaussianNoise,
    constant,
    round_trip,
    rounding_of,
)

SCALE = 0.01


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(500, 2, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kv_format", "bits"), [("e5m2", 2), ("e4m3", 3), ("e3m4", 4)])
def test_a_round_trip_is_off_by_half_a_step_of_the_mantissa_at_most(kv_format: str, bits: int) -> None:
    x = values().clamp(0.3, 2) * 0.01  # within the normal numbers of all three
    error = (round_trip(x, kv_format, SCALE) - x).abs() / x
    assert 0 < error.max() <= 2.0 ** -(bits + 1)


def test_int8_has_its_scales_in_the_rows() -> None:
    x = values()
    error = (round_trip(x, "int8") - x).abs()
    assert (error <= 0.5001 * x.abs().amax(-1, keepdim=True) / 127).all()


def test_noise_has_the_deviation_asked_for_and_no_mean() -> None:
    """32,000 draws: a standard deviation within 4 of its own standard errors, sqrt(1 / 2n)."""
    k, v = values(), values(1)
    noisy_k, noisy_v = GaussianNoise(constant(0.5), constant(2.0), seed=1).stored(k, v)
    for noisy, x, deviation in ((noisy_k, k, 0.5), (noisy_v, v, 2.0)):
        noise = (noisy - x) / deviation
        n = noise.numel()
        assert abs(float(noise.std()) - 1) < 4 * (2 * n) ** -0.5
        assert abs(float(noise.mean())) < 4 * n**-0.5
    independent = torch.corrcoef(torch.stack([(noisy_k - k).flatten(), (noisy_v - v).flatten()]))[0, 1]
    assert abs(float(independent)) < 4 * k.numel() ** -0.5


def test_noise_by_value_is_as_large_as_each_rounding_and_free_of_its_sign() -> None:
    x = values()
    error = round_trip(x, "e4m3", SCALE) - x
    deviation = rounding_of("e4m3", SCALE)
    assert torch.equal(deviation(x), error.abs())
    noisy, _ = GaussianNoise(deviation, constant(0.0), seed=1).stored(x, x)
    noise = noisy - x
    # E[noise^2] = error^2; its variance is 2 error^4.
    spread = float((2 * error.double() ** 4).sum().sqrt())
    assert abs(float((noise.double() ** 2).sum() - (error.double() ** 2).sum())) < 4 * spread
    correlation = float(torch.corrcoef(torch.stack([noise.flatten(), error.flatten()]))[0, 1])
    assert abs(correlation) < 8 * x.numel() ** -0.5  # errors differ in size, which widens it


def test_a_seed_repeats_its_noise_and_writing_again_does_not() -> None:
    x = values()
    noise, again, other = (GaussianNoise(constant(1.0), constant(1.0), seed) for seed in (1, 1, 2))
    first = noise.stored(x, x)[0]
    assert torch.equal(first, again.stored(x, x)[0])
    assert not torch.equal(first, other.stored(x, x)[0])
    assert not torch.equal(first, noise.stored(x, x)[0])


def test_a_replay_gives_the_recorded_choices_in_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    choices = [torch.rand(rows, 7, generator=generator) < 0.5 for rows in (3, 1, 3)]
    recorder = ChoiceRecorder()
    assert all(recorder.chosen(choice) is choice for choice in choices)
    replay = ChoiceReplay(recorder)
    assert all(torch.equal(replay.chosen(~choice), choice) for choice in choices)
    with pytest.raises(RuntimeError, match="the steps differ"):
        replay.chosen(choices[0])


def test_a_replay_over_other_steps_is_a_defect() -> None:
    recorder = ChoiceRecorder()
    recorder.chosen(torch.ones(3, 7, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="the steps differ"):
        ChoiceReplay(recorder).chosen(torch.ones(3, 8, dtype=torch.bool))
