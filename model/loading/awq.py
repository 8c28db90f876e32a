"""4-bit integer weights in the ``gemm`` layout of AWQ."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from page4.kernels.errors import InputError

from .int4 import WORD, check_groups, unpack
from .quantisation import Quantisation
from .slabs import slabs
from .stored import SCALES, Read, Stored

# The lowest bits of a word hold outputs 0, 2, 4, 6, then 1, 3, 5, 7; so output 1 is in the fifth four bits.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AwqInt4:
    """A matrix ``[N, inputs]``, stored transposed, with ``w = (q - z) * scale`` of its group and output.

    Attributes:
        name: of the weight.
        packed: int32 ``[inputs, N / 8]``, packed along the outputs.
        scale: ``[groups, N]``. zero_point: int32 ``[groups, N / 8]``.
        quantisation: what the config says.

    Source: AutoAWQ, version ``gemm`` with 4 bits.
    """

    name: str
    packed: Stored
    scale: Stored
    zero_point: Stored
    quantisation: Quantisation

    @property
    def parts(self) -> tuple[Stored, ...]:
        """See :class:`page4.model.loading.stored.Source`."""
        return self.packed, self.scale, self.zero_point

    def check(self, shape: tuple[int, ...], integer: bool) -> None:
        """See :class:`page4.model.loading.stored.Source`."""
        stem = self.name.removesuffix(".weight")
        if integer or len(shape) != 2 or shape[0] % WORD:
            raise InputError(
                f"{self.packed.shard}: {stem}.qweight cannot hold {list(shape)}, only matrices with a "
                f"multiple of {WORD} outputs"
            )
        outputs, inputs = shape
        self.packed.check(f"{stem}.qweight", (inputs, outputs // WORD), ("I32",))
        groups = self.scale.shape[0] if self.scale.shape else 0
        self.scale.check(f"{stem}.scales", (groups, outputs), SCALES)
        self.zero_point.check(f"{stem}.qzeros", (groups, outputs // WORD), ("I32",))
        check_groups(f"{self.scale.shard}: {self.name}", inputs, groups, self.quantisation.group_sizes)

    def fill(self, weight: Tensor, read: Read) -> None:
        """See :class:`page4.model.loading.stored.Source`."""
        packed, scale = read(self.packed), read(self.scale).float()
        zeros = unpack(read(self.zero_point), _ORDER)  # [groups, N]
        size = packed.shape[0] // scale.shape[0]
        for start, stop in slabs(packed.shape[0], scale.shape[1], multiple=size):
            group = slice(start // size, stop // size)
            values = unpack(packed[start:stop], _ORDER).unflatten(0, (-1, size)) - zeros[group, None]
            weight[:, start:stop].copy_((values.float() * scale[group, None]).flatten(0, 1).T)
