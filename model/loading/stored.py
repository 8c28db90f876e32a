"""Tensors of a checkpoint by their headers, and weights that are made of one or several of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from page4.kernels.errors import InputError


@dataclass(frozen=True)
class Stored:
    """One tensor as its shard's header describes it.

    Attributes:
        shard: the file. name: in that file.
        dtype: in the spelling of safetensors, such as ``BF16`` and ``F8_E4M3``.
        shape: of the stored tensor, packed where it is packed.
    """

    shard: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Refuses another shape or dtype; ``name`` is that in the text-only layout."""
        if self.shape != shape:
            raise InputError(f"{self.shard}: {name} has shape {list(self.shape)}, expected {list(shape)}")
        if self.dtype not in dtypes:
            raise InputError(f"{self.shard}: {name} is {self.dtype}, expected {' or '.join(dtypes)}")


Read = Callable[[Stored], Tensor]
"""Reads a stored tensor onto the CPU."""

SCALES = ("F32", "BF16", "F16")
"""Dtypes of scales."""

_FLOATS = ("F32", "BF16", "F16", "F64")


class Source(Protocol):
    """A weight, and the stored tensors that it is made of."""

    @property
    def parts(self) -> tuple[Stored, ...]:
        """The stored tensors, the largest first."""

    def check(self, shape: tuple[int, ...], integer: bool) -> None:
        """Refuses parts that cannot make up a weight of this shape; no data is read.

        Args:
            shape: of the weight. integer: whether it holds integers rather than floating-point numbers.
        """

    def fill(self, weight: Tensor, read: Read) -> None:
        """Reads the parts into the weight ``[...]``; values in FP32 are rounded once, to its dtype."""


@dataclass(frozen=True)
class Plain:
    """A weight stored as it is, in floating point of 16 bits or more, or as integers."""

    name: str
    stored: Stored

    @property
    def parts(self) -> tuple[Stored, ...]:
        """See :class:`Source`."""
        return (self.stored,)

    def check(self, shape: tuple[int, ...], integer: bool) -> None:
        """See :class:`Source`."""
        self.stored.check(self.name, shape, ("I64",) if integer else _FLOATS)

    def fill(self, weight: Tensor, read: Read) -> None:
        """See :class:`Source`."""
        weight.copy_(read(self.stored))
