"""FP8 weights with a scale per block: E4M3 codes beside ``weight_scale_inv``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from page4.kernels.errors import InputError

from .slabs import slabs
from .stored import SCALES, Read, Stored

FP8 = "F8_E4M3"


@dataclass(frozen=True)
class BlockFP8:
    """A matrix, or a stack of them, with ``w = code * scale`` of the block.

    Attributes:
        name: of the weight.
        codes: E4M3 ``[..., R, C]``. scale: ``[..., ceil(R / rows), ceil(C / columns)]``.
        block: rows and columns of a block; the last ones of a matrix may be cut off.

    Source: the FP8 checkpoints of DeepSeek-V3, whose ``weight_scale_inv`` multiplies despite its name.
    """

    name: str
    codes: Stored
    scale: Stored
    block: tuple[int, int]

    @property
    def parts(self) -> tuple[Stored, ...]:
        """See :class:`page4.model.loading.stored.Source`."""
        return self.codes, self.scale

    def check(self, shape: tuple[int, ...], integer: bool) -> None:
        """See :class:`page4.model.loading.stored.Source`."""
        if integer or len(shape) < 2:
            raise InputError(f"{self.codes.shard}: {self.name} is {FP8}, which only matrices may be")
        self.codes.check(self.name, shape, (FP8,))
        blocks = (-(-size // per) for size, per in zip(shape[-2:], self.block, strict=True))
        self.scale.check(f"{self.name}_scale_inv", (*shape[:-2], *blocks), SCALES)

    def fill(self, weight: Tensor, read: Read) -> None:
        """See :class:`page4.model.loading.stored.Source`."""
        codes, scale = read(self.codes), read(self.scale)
        matrices = (weight, codes, scale) if weight.ndim > 2 else (weight[None], codes[None], scale[None])
        # The leading dimension of a stack; deeper stacks do not occur.
        for target, matrix, scales in zip(*matrices, strict=True):
            _decode(target, matrix, scales.float(), self.block)


def _decode(weight: Tensor, codes: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    """One matrix ``[R, C]``, a slab of whole blocks at a time."""
    rows, columns = block
    for start, stop in slabs(codes.shape[0], codes.shape[1], multiple=rows):
        scales = scale[start // rows : -(-stop // rows)].repeat_interleave(columns, dim=1)
        scales = scales[:, : codes.shape[1]].repeat_interleave(rows, dim=0)[: stop - start]
        weight[start:stop].copy_(codes[start:stop].float() * scales)
