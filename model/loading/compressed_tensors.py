"""4-bit integer weights in the ``pack-quantized`` layout of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from page4.kernels.errors import InputError

from .int4 import WORD, check_groups, unpack
from .quantisation import Quantisation
from .slabs import slabs
from .stored import SCALES, Read, Stored

_OFFSET = 8  # stored integers are shifted to 0..15


@dataclass(frozen=True)
class CompressedInt4:
    """A matrix ``[N, inputs]`` with ``w = (q - z) * scale`` of the output and group of inputs.

    Attributes:
        name: of the weight.
        packed: int32 ``[N, ceil(inputs / 8)]``, packed along the inputs, the first in the lowest bits.
        scale: ``[N, groups]``.
        shape: int64 ``[2]``: N and inputs.
        zero_point: int32 ``[ceil(N / 8), groups]``, packed along the outputs; None: z is 0.
        quantisation: what the config says.

    Source: compressed-tensors, format ``pack-quantized`` with ``num_bits`` 4.
    """

    name: str
    packed: Stored
    scale: Stored
    shape: Stored
    zero_point: Stored | None
    quantisation: Quantisation

    @property
    def parts(self) -> tuple[Stored, ...]:
        """See :class:`page4.model.loading.stored.Source`."""
        parts = (self.packed, self.scale, self.shape, self.zero_point)
        return tuple(part for part in parts if part is not None)

    def check(self, shape: tuple[int, ...], integer: bool) -> None:
        """See :class:`page4.model.loading.stored.Source`."""
        if integer or len(shape) != 2:
            raise InputError(f"{self.packed.shard}: {self.name} is packed, which only matrices may be")
        outputs, inputs = shape
        self.packed.check(f"{self.name}_packed", (outputs, -(-inputs // WORD)), ("I32",))
        groups = self.scale.shape[-1] if self.scale.shape else 0
        self.scale.check(f"{self.name}_scale", (outputs, groups), SCALES)
        self.shape.check(f"{self.name}_shape", (2,), ("I64", "I32"))
        check_groups(f"{self.scale.shard}: {self.name}", inputs, groups, self.quantisation.group_sizes)
        if self.zero_point is not None:
            packed = (-(-outputs // WORD), groups)
            self.zero_point.check(f"{self.name}_zero_point", packed, ("I32",))
        if self.quantisation.symmetric not in (None, self.zero_point is None):
            raise InputError(
                f"{self.packed.shard}: {self.name} comes with{'out' if self.zero_point is None else ''} zero "
                "points, the config's 'symmetric' says otherwise"
            )

    def fill(self, weight: Tensor, read: Read) -> None:
        """See :class:`page4.model.loading.stored.Source`."""
        packed, scale, shape = read(self.packed), read(self.scale).float(), read(self.shape).tolist()
        if shape != list(weight.shape):
            raise InputError(
                f"{self.shape.shard}: {self.name}_shape says {shape}, expected {list(weight.shape)}"
            )
        outputs, groups = scale.shape
        zeros = None
        if self.zero_point is not None:
            zeros = unpack(read(self.zero_point).T)[:, :outputs].T - _OFFSET  # [N, groups]
        for start, stop in slabs(outputs, weight.shape[1]):
            values = unpack(packed[start:stop])[:, : weight.shape[1]] - _OFFSET
            values = values.unflatten(1, (groups, -1))
            if zeros is not None:
                values = values - zeros[start:stop, :, None]
            weight[start:stop].copy_((values.float() * scale[start:stop, :, None]).flatten(1))
