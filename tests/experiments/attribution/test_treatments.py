"""Treatments: what is calibrated for an arm, and what it makes of the arm's K and V."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from page4.experiments.acceptance.config import Arm
from page4.experiments.attribution.calibration import Calibration
from page4.experiments.attribution.treatments import (
    LeastSquares,
    PerHead,
    Rotated,
    RoundingNoise,
    ScaledBy,
    Treatment,
)
from page4.kvcache import KVScales, get_format
from page4.kvcache.scale_rules import choose_scale, relative_rms_error, rms_error
from page4.kvcache.scales import UNIT_SCALES
from page4.model import Qwen4ExpForCausalLM
from tests.oracle.tiny import random_tokens

E4M3 = Arm("e4m3", "e4m3", "e4m3", 0)
TREATMENTS = [
    Treatment(),
    ScaledBy(0.5),
    LeastSquares(),
    Rotated(),
    PerHead(),
    RoundingNoise("e4m3", "layer"),
    RoundingNoise("e4m3", "value"),
]


@pytest.fixture(scope="module")
def calibration(checkpoint: Path) -> Calibration:
    model = Qwen4ExpForCausalLM.from_pretrained(checkpoint, backend="reference")
    return Calibration(model, [random_tokens(60, seed, 90) for seed in (1, 2)], prefill_chunk=32)


def scales_of(treatment: Treatment, arm: Arm, calibration: Calibration) -> KVScales:
    scales = treatment.scales(treatment.calibrate(arm, calibration))
    assert scales is not None
    return scales


@pytest.mark.parametrize("treatment", TREATMENTS, ids=lambda t: type(t).__name__)
def test_numbers_survive_their_file_to_the_bit(treatment: Treatment, calibration: Calibration) -> None:
    numbers = treatment.calibrate(E4M3, calibration)
    read = json.loads(json.dumps(numbers))
    assert read == numbers and treatment.scales(read) == treatment.scales(numbers)
    x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0))
    changes = [treatment.interventions(n, calibration, seed=3) for n in (numbers, read)]
    assert changes[0].keys() == changes[1].keys() and set(changes[0]) <= {1, 2, None}
    for layer in changes[0]:
        for a, b in zip(*(of[layer].stored(x, x) for of in changes), strict=True):
            assert torch.equal(a, b)


def test_formats_by_layer_get_scales_by_layer(calibration: Calibration) -> None:
    everywhere = scales_of(Treatment(), E4M3, calibration)
    mixed = scales_of(Treatment(), Arm("mixed", "fp16,2:e4m3", "fp16", 0), calibration)
    assert mixed == KVScales((UNIT_SCALES, everywhere.target[1]), None)
    assert Treatment().calibrate(Arm("fp16", "fp16", "int8", 0), calibration) == {"scales": None}


def test_a_factor_multiplies_every_scale(calibration: Calibration) -> None:
    plain, scaled = (scales_of(treatment, E4M3, calibration) for treatment in (Treatment(), ScaledBy(0.25)))
    pairs = zip((*plain.target, plain.draft), (*scaled.target, scaled.draft), strict=True)
    for before, after in pairs:
        assert before is not None and after is not None
        assert (after.k, after.v) == (before.k / 4, before.v / 4)
    draft_only = scales_of(ScaledBy(0.25, draft_only=True), E4M3, calibration)
    assert draft_only == KVScales(plain.target, scaled.draft)


def test_scales_of_least_error_lose_less_of_what_was_observed(calibration: Calibration) -> None:
    arm, wanted = Arm("e3m4", "e3m4", "e3m4", 0), get_format("e3m4")
    k, _ = calibration.observed.layers["1"]
    plain, least = (scales_of(treatment, arm, calibration) for treatment in (Treatment(), LeastSquares()))
    assert relative_rms_error(k, wanted, least.target[0].k) <= relative_rms_error(
        k, wanted, plain.target[0].k
    )


def test_a_rotation_is_calibrated_as_it_is_stored(calibration: Calibration) -> None:
    """K's maxima change and V's do not, and K keeps its power: a rotation moves no sum of squares."""
    plain, rotated = (scales_of(treatment, E4M3, calibration) for treatment in (Treatment(), Rotated()))
    assert rotated.target[0].v == plain.target[0].v and rotated.target[0].k != plain.target[0].k
    (k, _), (rotated_k, _) = (seen.layers["1"] for seen in (calibration.observed, calibration.rotated))
    powers = [float((counts * values**2).sum()) for values, counts in (k.occurring(), rotated_k.occurring())]
    # Both are of values rounded to FP16, each by 2^-11 of itself at most.
    assert powers[1] == pytest.approx(powers[0], rel=2 * 2**-11)


def test_heads_are_divided_by_their_own_scales(calibration: Calibration) -> None:
    numbers = PerHead().calibrate(E4M3, calibration)
    k, _ = calibration.observed.layers["draft"]
    assert numbers["per_head"]["draft"][0] == [choose_scale(head, get_format("e4m3")) for head in k.heads]
    assert scales_of(PerHead(), E4M3, calibration) == KVScales((UNIT_SCALES,) * 2, UNIT_SCALES)
    x = torch.ones(1, 2, 32)
    stored, _ = PerHead().interventions(numbers, calibration, seed=0)[None].stored(x, x)
    expected = 1 / torch.tensor(numbers["per_head"]["draft"][0])
    assert torch.allclose(stored[0, :, 0], expected) and len(set(expected.tolist())) == 2


def test_noise_by_layer_has_the_rms_of_the_rounding(calibration: Calibration) -> None:
    noise = RoundingNoise("e4m3", "layer")
    numbers = noise.calibrate(Arm("noise", "fp16", "fp16", 0), calibration)
    assert numbers["scales"] is None
    k, _ = calibration.observed.layers["2"]
    scale = choose_scale(k, get_format("e4m3"))
    rms = rms_error(k, get_format("e4m3"), scale)
    assert numbers["rounding"]["2"][0] == {"scale": scale, "rms": rms}
    x = torch.zeros(2000, 2, 32)
    stored, _ = noise.interventions(numbers, calibration, seed=1)[2].stored(x, x)
    assert float(stored.std()) == pytest.approx(rms, rel=4 * (2 * x.numel()) ** -0.5)


def test_layers_have_noise_of_their_own(calibration: Calibration) -> None:
    noise = RoundingNoise("e4m3", "layer")
    changes = noise.interventions(noise.calibrate(E4M3, calibration), calibration, seed=1)
    x = torch.zeros(8, 2, 32)
    drawn = [changes[layer].stored(x, x)[0] for layer in (1, 2, None)]
    correlation = torch.corrcoef(torch.stack([noise.flatten() for noise in drawn]))
    assert float((correlation - torch.eye(3)).abs().max()) < 5 * x.numel() ** -0.5
