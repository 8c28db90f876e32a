"""A model of some of a checkpoint's layers, for studies of single layers and kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from page4.kernels.errors import InputError

from ..config import Qwen4ExpConfig
from .names import text_name

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def subset(
    config: Qwen4ExpConfig, layers: Sequence[int]
) -> tuple[Qwen4ExpConfig, Callable[[str], str | None]]:
    """The config of a model of these layers alone, and what a stored tensor is called in it.

    The layers keep their order and are counted anew. Embedding, head, final mixer and MTP head stay. The
    second result maps a tensor of another layer to None.

    Raises:
        InputError: the layers are none, out of range, not ascending, or name a PLE layer without those before
            it, whose n-gram tables have the primes that come first.
    """
    last = config.num_hidden_layers - 1
    chosen = list(layers)
    if not chosen or any(type(i) is not int or not 0 <= i <= last for i in chosen):
        raise InputError(f"layers is {layers!r}, expected layers from 0 to {last}")
    if chosen != sorted(set(chosen)):
        raise InputError(f"layers is {layers!r}, expected ascending ones")
    ple = [place + 1 for place, layer in enumerate(chosen) if layer + 1 in config.ple_layer_ids]
    if tuple(chosen[id - 1] + 1 for id in ple) != config.ple_layer_ids[: len(ple)]:
        raise InputError(f"layers is {layers!r}: a PLE layer needs those before it, {config.ple_layer_ids}")
    smaller = replace(
        config,
        num_hidden_layers=len(chosen),
        layer_types=tuple(config.layer_types[i] for i in chosen),
        ple_layer_ids=tuple(ple),
    )

    def name_of(stored: str) -> str | None:
        name = text_name(stored)
        match = _LAYER.match(name) if name is not None else None
        if name is None or match is None or int(match[1]) > last:
            return name
        layer = int(match[1])
        return f"model.layers.{chosen.index(layer)}.{name[match.end() :]}" if layer in chosen else None

    return smaller, name_of
