"""What is done to an arm's K and V beside storing them in its formats.

A treatment calibrates numbers once. They are kept in the study's folder, and all else follows from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from page4.experiments.acceptance.config import Arm
from page4.experiments.acceptance.scales import scales_from_json
from page4.experiments.attribution.calibration import Calibration, Interventions
from page4.experiments.attribution.interventions import GaussianNoise, constant, rounding_of
from page4.kvcache import KVScales, ScalePair, get_format
from page4.kvcache.intervention import LinearStorage
from page4.kvcache.magnitudes import Magnitudes
from page4.kvcache.scale_rules import choose_scale, rms_error
from page4.kvcache.scales import UNIT_SCALES

Numbers = Mapping[str, Any]
"""What was calibrated for an arm, as JSON holds it; layers go by number, the MTP layer by "draft"."""


@dataclass(frozen=True)
class Treatment:
    """None: K and V are stored in the arm's formats, with scales that clip nothing observed."""

    def calibrate(self, arm: Arm, calibration: Calibration) -> Numbers:
        """The numbers of an arm: its static "scales", and what else the treatment needs."""
        return _scales(calibration.observed.scales_for(*arm.formats))

    def scales(self, numbers: Numbers) -> KVScales | None:
        """Static scales."""
        return None if numbers["scales"] is None else scales_from_json(numbers["scales"])

    def interventions(self, numbers: Numbers, calibration: Calibration, seed: int) -> Interventions:
        """New interventions, for one cell; of the calibration, nothing is used but the layers it is for."""
        return {}


@dataclass(frozen=True)
class FrozenChoice(Treatment):
    """Every row attends to the blocks that the same row of an FP16 run chose, whatever its own scores say.

    A verified draft that differs from the FP16 run's gets the choice that belonged to the other draft.
    """


@dataclass(frozen=True)
class ScaledBy(Treatment):
    """Static scales multiplied by a factor: below 1 large values are clipped, above 1 small ones vanish.

    Attributes:
        factor: above 0.
        draft_only: leave the target's scales as they are.
    """

    factor: float
    draft_only: bool = False

    def scales(self, numbers: Numbers) -> KVScales | None:
        """The calibrated scales times the factor."""
        scales = super().scales(numbers)
        if scales is None:
            return None
        target = scales.target if self.draft_only else tuple(map(self._scaled, scales.target))
        return KVScales(target, None if scales.draft is None else self._scaled(scales.draft))

    def _scaled(self, pair: ScalePair) -> ScalePair:
        return ScalePair(pair.k * self.factor, pair.v * self.factor)


@dataclass(frozen=True)
class LeastSquares(Treatment):
    """Static scales of least squared error: some outliers are clipped so that the many are rounded less."""

    def calibrate(self, arm: Arm, calibration: Calibration) -> Numbers:
        """Scales by the rule "mse" of `choose_scale`."""
        return _scales(calibration.observed.scales_for(*arm.formats, rule="mse"))


@dataclass(frozen=True)
class Rotated(Treatment):
    """K, and the queries with it, rotated by a Hadamard matrix: no component stands out when K is rounded."""

    def calibrate(self, arm: Arm, calibration: Calibration) -> Numbers:
        """Scales of K as it is stored."""
        return _scales(calibration.rotated.scales_for(*arm.formats))

    def interventions(self, numbers: Numbers, calibration: Calibration, seed: int) -> Interventions:
        """The rotation of every layer."""
        return calibration.rotation()


@dataclass(frozen=True)
class PerHead(Treatment):
    """A static scale for every KV head instead of one for all; the arm's format is the same in all layers."""

    def calibrate(self, arm: Arm, calibration: Calibration) -> Numbers:
        """The heads' scales of K and V, "per_head"; those of the cache are 1."""
        target, draft = (get_format(name) for name in arm.formats)
        units = KVScales((UNIT_SCALES,) * len(calibration.target_layers), UNIT_SCALES)
        per_head = {
            name: [
                [choose_scale(head, draft if name == "draft" else target) for head in x.heads] for x in pair
            ]
            for name, pair in calibration.observed.layers.items()
        }
        return {**_scales(units), "per_head": per_head}

    def interventions(self, numbers: Numbers, calibration: Calibration, seed: int) -> Interventions:
        """K and V of each head divided by its scale."""

        def divided_by(scales: list[float]) -> torch.Tensor:
            return torch.eye(calibration.head_dim) / torch.tensor(scales)[:, None, None]  # [Hkv, D, D]

        per_head = calibration.of_layers(numbers["per_head"])
        return {layer: LinearStorage(divided_by(k), divided_by(v)) for layer, (k, v) in per_head.items()}


@dataclass(frozen=True)
class RoundingNoise(Treatment):
    """K and V in FP16 with Gaussian noise as large as the rounding of a format.

    Attributes:
        kv_format: a format with static scales.
        like: "layer": one deviation for K and one for V of a layer, the RMS of the rounding of what was
            observed; "value": each value's own rounding error is its deviation.
    """

    kv_format: str
    like: Literal["layer", "value"]

    def calibrate(self, arm: Arm, calibration: Calibration) -> Numbers:
        """Beside the arm's scales the "rounding" that is matched: scale and RMS for K and V."""

        def of(part: Magnitudes) -> dict[str, float]:
            wanted = get_format(self.kv_format)
            scale = choose_scale(part, wanted)
            return {"scale": scale, "rms": rms_error(part, wanted, scale)}

        rounding = {name: [of(part) for part in pair] for name, pair in calibration.observed.layers.items()}
        return {**super().calibrate(arm, calibration), "rounding": rounding}

    def interventions(self, numbers: Numbers, calibration: Calibration, seed: int) -> Interventions:
        """Noise of every layer, each from a seed of its own."""
        made: dict[int | None, GaussianNoise] = {}
        for index, (layer, rounding) in enumerate(calibration.of_layers(numbers["rounding"]).items()):
            k, v = (
                constant(part["rms"]) if self.like == "layer" else rounding_of(self.kv_format, part["scale"])
                for part in rounding
            )
            made[layer] = GaussianNoise(k, v, seed + index)
        return made


def _scales(scales: KVScales | None) -> Numbers:
    # Lists in place of tuples: what JSON gives back.
    if scales is None:
        return {"scales": None}
    target, draft = [dataclasses.asdict(pair) for pair in scales.target], scales.draft
    return {"scales": {"target": target, "draft": None if draft is None else dataclasses.asdict(draft)}}
