"""The study's arms: every condition, what it is stored in and what is done to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from page4.experiments.acceptance.config import Arm
from page4.experiments.attribution.treatments import (
    FrozenChoice,
    LeastSquares,
    PerHead,
    Rotated,
    RoundingNoise,
    ScaledBy,
    Treatment,
)
from page4.kernels.errors import InputError

Group = Literal["place", "noise", "scale", "choice", "formats"]
GROUPS: tuple[Group, ...] = get_args(Group)

HEADINGS: dict[str, str] = {
    "control": "Control",
    "place": "Where: the format in some layers only",
    "noise": "Size or structure: Gaussian noise in place of rounding",
    "scale": "Static scales times a factor",
    "choice": "Selection frozen to the FP16 run's",
    "formats": "Other formats of 8 bits",
}

FACTORS = (0.25, 0.5, 2.0, 8.0, 64.0)
DRAFT_FACTORS = (0.5, 2.0)

PLAIN = Treatment()


@dataclass(frozen=True)
class Condition:
    """One arm of the study.

    Attributes:
        arm: Its name, formats and nonce.
        group: The question it belongs to, or "control".
        says: What is stored how, for tables and figures.
        treatment: What is done beside storing it so.
    """

    arm: Arm
    group: str
    says: str
    treatment: Treatment = PLAIN


def study_conditions(kv_format: str, groups: Sequence[str], layers: Sequence[int]) -> list[Condition]:
    """The baseline, its A/A control, the format everywhere, and the conditions of the groups.

    Args:
        kv_format: The format whose loss is attributed; it has static scales.
        layers: Numbers of the QSA layers.
    """
    made = [
        Condition(Arm("fp16", "fp16", "fp16", 0), "control", "FP16: the baseline"),
        Condition(Arm("fp16_again", "fp16", "fp16", 1), "control", "A/A: FP16 again, other nonces"),
        Condition(Arm(kv_format, kv_format, kv_format, 0), "place", f"{kv_format} everywhere"),
    ]
    by_group = {
        "place": _places(kv_format, layers),
        "noise": _noises(kv_format),
        "scale": _scales(kv_format),
        "choice": [
            _whole(f"{kv_format}_frozen", kv_format, "choice", "blocks as the FP16 run chose", FrozenChoice())
        ],
        "formats": _formats(kv_format),
    }
    return made + [condition for group in GROUPS if group in groups for condition in by_group[group]]


def check_groups(groups: Sequence[str]) -> None:
    """Refuse a group that is none.

    Raises:
        InputError: an unknown group or one named twice.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown or len(set(groups)) < len(groups):
        raise InputError(f"groups must name some of {', '.join(GROUPS)}, none twice; got {', '.join(groups)}")


def _whole(name: str, kv_format: str, group: str, says: str, treatment: Treatment = PLAIN) -> Condition:
    """A condition with one format in all layers, the draft's among them."""
    return Condition(Arm(name, kv_format, kv_format, 0), group, says, treatment)


def _places(kv_format: str, layers: Sequence[int]) -> list[Condition]:
    """Target and draft, then each target layer alone and all without it."""
    places = [
        ("target", kv_format, "fp16", "target only"),
        ("draft", "fp16", kv_format, "draft only"),
    ]
    for layer in layers if len(layers) > 1 else ():
        places += [
            (f"layer{layer}", f"fp16,{layer}:{kv_format}", "fp16", f"layer {layer} only"),
            (f"not_layer{layer}", f"{kv_format},{layer}:fp16", kv_format, f"all but layer {layer}"),
        ]
    return [
        Condition(Arm(f"{kv_format}_{name}", target, draft, 0), "place", says)
        for name, target, draft, says in places
    ]


def _scales(kv_format: str) -> list[Condition]:
    """All scales times a factor, then the draft's alone."""
    wrong = [(f"x{factor:g}", f"scales x {factor:g}", ScaledBy(factor)) for factor in FACTORS]
    wrong += [
        (f"draft_x{factor:g}", f"draft scales x {factor:g}", ScaledBy(factor, draft_only=True))
        for factor in DRAFT_FACTORS
    ]
    return [_whole(f"{kv_format}_{name}", kv_format, "scale", says, how) for name, says, how in wrong]


def _noises(kv_format: str) -> list[Condition]:
    says = f"FP16 with noise as large as {kv_format}'s rounding"
    return [
        _whole("noise_layer", "fp16", "noise", f"{says}, by layer", RoundingNoise(kv_format, "layer")),
        _whole("noise_value", "fp16", "noise", f"{says}, by value", RoundingNoise(kv_format, "value")),
    ]


def _formats(kv_format: str) -> list[Condition]:
    """Formats of the same bytes, scales per token (int8's) aside; the studied one is there already."""
    others = [
        _whole(name, name, "formats", says)
        for name, says in (
            ("e4m3", "e4m3"),
            ("e5m2", "e5m2"),
            ("e3m4", "e3m4"),
            ("e2m5", "e2m5"),
            ("int8", "int8, a scale per token and head"),
        )
        if name != kv_format
    ]
    for name in ("e4m3", "e2m5"):
        others += [
            _whole(f"{name}_per_head", name, "formats", f"{name}, a static scale per head", PerHead()),
            _whole(f"{name}_rotated", name, "formats", f"{name}, K rotated", Rotated()),
        ]
    others.append(_whole("e2m5_mse", "e2m5", "formats", "e2m5, scales of least error", LeastSquares()))
    return others
