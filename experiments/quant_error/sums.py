"""Sums over rows that stay on the device until a prompt is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from page4.experiments.quant_error.config import Window

Key = tuple[str, Window, str]
"""Arm, window of positions, layer."""


class Sums:
    """Named sums by key, float64; adding to them does not wait for the device."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Key, tuple[str, ...]], Tensor] = {}

    def add(self, key: Key, names: Sequence[str], values: Tensor) -> None:
        """Add `values [names, rows]`, summed over the rows."""
        place = (key, tuple(names))
        summed = values.double().sum(dim=1)
        self._sums[place] = self._sums[place] + summed if place in self._sums else summed

    def items(self) -> Iterator[tuple[Key, dict[str, float]]]:
        """The sums of every key by name, in the order of the keys' first addition."""
        merged: dict[Key, dict[str, float]] = {}
        numbers = iter(torch.cat(list(self._sums.values())).tolist() if self._sums else [])
        for key, names in self._sums:
            merged.setdefault(key, {}).update((name, next(numbers)) for name in names)
        return iter(merged.items())
