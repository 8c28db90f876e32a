"""In which form a weight is stored."""

from __future__ import annotations

from collections.abc import Mapping

from page4.kernels.errors import InputError

from .awq import AwqInt4
from .block_fp8 import FP8, BlockFP8
from .compressed_tensors import CompressedInt4
from .names import listed
from .quantisation import Quantisation
from .stored import Plain, Source, Stored


class Incomplete(Exception):
    """Some parts of a quantised weight are stored and others are not.

    Attributes:
        there: what is stored. missing: names of what is not.
    """

    def __init__(self, there: list[Stored], missing: list[str]) -> None:
        super().__init__(listed(missing))
        self.there, self.missing = there, missing


def find_source(name: str, stored: Mapping[str, Stored], quantisation: Quantisation) -> Source | None:
    """The form in which the weight ``name`` is stored, or None when nothing of it is.

    The parts tell: a weight of FP8 comes with scales, 4-bit integers under names of their own.

    Raises:
        Incomplete: a part of a form is missing.
        InputError: stored in two forms, or in one that the config does not say.
    """
    sources = [
        source
        for source in (
            _whole(name, stored, quantisation),
            _compressed(name, stored, quantisation),
            _awq(name, stored, quantisation),
        )
        if source is not None
    ]
    if len(sources) > 1:
        first, second = (source.parts[0] for source in sources[:2])
        raise InputError(
            f"{first.shard}: {name} is stored twice, as {listed([first.name])} and {listed([second.name])}"
        )
    return sources[0] if sources else None


def _whole(name: str, stored: Mapping[str, Stored], quantisation: Quantisation) -> Source | None:
    if name not in stored:
        return None
    if stored[name].dtype != FP8:
        return Plain(name, stored[name])
    codes, scale = _parts(stored, name, f"{name}_scale_inv")
    return BlockFP8(name, codes, scale, quantisation.block)


def _compressed(name: str, stored: Mapping[str, Stored], quantisation: Quantisation) -> Source | None:
    if f"{name}_packed" not in stored:
        return None
    _said_by_config(stored[f"{name}_packed"], "compressed-tensors", quantisation)
    packed, scale, shape = _parts(stored, f"{name}_packed", f"{name}_scale", f"{name}_shape")
    zero_point = stored.get(f"{name}_zero_point")
    return CompressedInt4(name, packed, scale, shape, zero_point, quantisation)


def _awq(name: str, stored: Mapping[str, Stored], quantisation: Quantisation) -> Source | None:
    stem = name.removesuffix(".weight")
    if stem == name or f"{stem}.qweight" not in stored:
        return None
    _said_by_config(stored[f"{stem}.qweight"], "awq", quantisation)
    packed, scale, zero_point = _parts(stored, f"{stem}.qweight", f"{stem}.scales", f"{stem}.qzeros")
    return AwqInt4(name, packed, scale, zero_point, quantisation)


def _parts(stored: Mapping[str, Stored], *names: str) -> list[Stored]:
    there = [stored[name] for name in names if name in stored]
    if len(there) < len(names):
        raise Incomplete(there, [name for name in names if name not in stored])
    return there


def _said_by_config(part: Stored, method: str, quantisation: Quantisation) -> None:
    """The same names mean other layouts in other methods, so that the config has the word."""
    if quantisation.int4 != method:
        raise InputError(
            f"{part.shard}: {listed([part.name])} is a part of {method}, but the quantization_config of "
            "config.json does not say so"
        )
