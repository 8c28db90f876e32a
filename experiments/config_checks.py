"""What configurations of studies check and choose in the same way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from page4.experiments.config import ConfigT, DataclassInstance
from page4.experiments.device import resolve_device
from page4.kernels.errors import InputError

BACKENDS = {"cpu": {"backend": "reference"}, "cuda": {"backend": "triton"}}
"""For `choose_by_device`: the implementation of the hot paths that a study runs on."""


def check_least(config: DataclassInstance, least: Mapping[str, float]) -> None:
    """Refuse fields below their least value; one that is None was left open.

    Raises:
        InputError: Names the first of them.
    """
    for name, low in least.items():
        value = getattr(config, name)
        if value is not None and value < low:
            raise InputError(f"{name} must be at least {low}, got {value}")


def check_lengths(lengths: Sequence[int] | None) -> None:
    """Refuse context lengths that do not ascend from at least 1; None was left open.

    Raises:
        InputError: Shows them.
    """
    if lengths is None:
        return
    if not lengths or lengths[0] < 1 or any(b <= a for a, b in itertools.pairwise(lengths)):
        given = ", ".join(map(str, lengths)) or "none"
        raise InputError(f"lengths must be positive and ascending, got {given}")


def check_confidence(confidence: float) -> None:
    """Refuse a coverage that no interval has.

    Raises:
        InputError: It is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise InputError(f"confidence must lie between 0 and 1, got {confidence}")


def choose_by_device(config: ConfigT, by_device: Mapping[str, Mapping[str, Any]]) -> ConfigT:
    """The configuration with its device chosen, and each field that is None as it is on this device.

    Args:
        by_device: Such fields, for "cpu" and "cuda".

    Raises:
        InputError: CUDA was asked for and there is none.
    """
    device = "cuda" if resolve_device(getattr(config, "device")).type == "cuda" else "cpu"  # noqa: B009 -- not in the protocol
    chosen = {name: value for name, value in by_device[device].items() if getattr(config, name) is None}
    return dataclasses.replace(config, device=device, **chosen)
