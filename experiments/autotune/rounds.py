"""Which configurations are tried first, and which are worth trying then.

Compiling takes nearly all of the time, and most tiles are far from the best at any number of splits. So every
tile is tried with about the default's splits, and only the fastest ones with all other numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from page4.experiments.autotune.choice import Trial

KEPT = 3  # tiles that are tried with every number of splits


def tile_of(config: Any) -> Any:
    """A configuration but for its splits, if it has any."""
    return dataclasses.replace(config, splits=1) if hasattr(config, "splits") else config


def first_round(configs: Sequence[Any], default: Any) -> list[Any]:
    """The default, and every tile with the number of splits nearest to the default's (by ratio)."""
    nearest: dict[Any, Any] = {}
    for config in configs:
        held = nearest.setdefault(tile_of(config), config)
        if _distance(config, default) < _distance(held, default):
            nearest[tile_of(config)] = config
    return list(dict.fromkeys([default, *nearest.values()]))


def next_round(configs: Sequence[Any], trials: Sequence[Trial], tiles: int = KEPT) -> list[Any]:
    """What has not been tried of the tiles that were fastest; nothing once that is done.

    Tiles that are not tried again cannot become faster, so the fastest stay the same.
    """
    best: dict[Any, float] = {}
    for trial in trials:
        if trial.median_us is not None:
            tile = tile_of(trial.config)
            best[tile] = min(trial.median_us, best.get(tile, math.inf))
    kept = set(sorted(best, key=lambda tile: (best[tile], dataclasses.astuple(tile)))[:tiles])
    tried = {trial.config for trial in trials}
    return [config for config in configs if config not in tried and tile_of(config) in kept]


def _distance(config: Any, default: Any) -> float:
    return abs(math.log(config.splits / default.splits)) if hasattr(config, "splits") else 0.0
