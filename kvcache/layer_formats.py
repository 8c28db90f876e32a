"""Formats of the target's QSA layers: one for all, or one with exceptions by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from page4.kernels.errors import InputError

from .formats import KVFormat, get_format
from .scales import UNIT_SCALES, KVScales

_EXCEPTION = re.compile(r"([0-9]+):(\w+)")


@dataclass(frozen=True)
class LayerFormats:
    """Formats by layer, written ``format`` or ``format,layer:format,...``.

    ``e4m3,3:fp16`` is fp16 in layer 3 and e4m3 in every other QSA layer. Layers are numbered as the model
    numbers them, from 0, layers without K/V included.

    Attributes:
        text: what the user wrote.
        default: of the layers that are not named.
        exceptions: of those that are, by layer.

    Raises:
        InputError: not of this form, an unknown format, or a layer named twice.
    """

    text: str
    default: KVFormat = field(init=False)
    exceptions: Mapping[int, KVFormat] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        default, *others = self.text.split(",")
        exceptions: dict[int, KVFormat] = {}
        for other in others:
            match = _EXCEPTION.fullmatch(other)
            if match is None:
                raise InputError(
                    f"KV format {self.text!r}: {other!r} is not layer:format, as in {default},3:fp16"
                )
            layer = int(match[1])
            if layer in exceptions:
                raise InputError(f"KV format {self.text!r} names layer {layer} twice")
            exceptions[layer] = get_format(match[2])
        object.__setattr__(self, "default", get_format(default))
        object.__setattr__(self, "exceptions", exceptions)

    @property
    def distinct(self) -> list[KVFormat]:
        """Every format once, the default first."""
        return list(dict.fromkeys([self.default, *self.exceptions.values()]))

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [used.name for used in self.distinct]

    def of(self, layers: Sequence[int]) -> tuple[KVFormat, ...]:
        """The formats of a model's QSA layers, given by their numbers, in that order.

        Raises:
            InputError: an exception is made for a layer that is none of them.
        """
        for layer in self.exceptions:
            if layer not in layers:
                raise InputError(
                    f"KV format {self.text!r} names layer {layer}; the QSA layers are "
                    f"{', '.join(map(str, layers)) or 'none'}"
                )
        return tuple(self.exceptions.get(layer, self.default) for layer in layers)


def draft_format(target: LayerFormats, draft: str | None) -> KVFormat:
    """The MTP layer's format: the one named, else the target's default.

    Raises:
        InputError: an unknown format; the MTP layer is one, so there are no exceptions.
    """
    return target.default if draft is None else get_format(draft)


def scales_of(
    target: LayerFormats, draft: KVFormat, layers: Sequence[int], by_format: Mapping[str, KVScales]
) -> KVScales | None:
    """Static scales of every QSA layer and of the draft, each from those calibrated for its own format.

    Args:
        layers: numbers of the QSA layers, in the order of the scales.
        by_format: scales of all layers, by name of the format.
    Returns:
        None where neither target nor draft needs any; unit scales in target layers that need none.
    """
    formats = target.of(layers)
    pairs = [
        by_format[used.name].target[index] if used.needs_scale else UNIT_SCALES
        for index, used in enumerate(formats)
    ]
    needed = any(used.needs_scale for used in formats)
    of_draft = by_format[draft.name].draft if draft.needs_scale else None
    if not needed and of_draft is None:
        return None
    return KVScales(tuple(pairs) if needed else (), of_draft)
