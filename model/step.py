"""One step's rows with everything that is the same for all its layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from page4.kernels.norm_rope import rotary_cos_sin
from page4.kvcache.pages import BlockTables

from .config import Qwen4ExpConfig
from .rows import RowBatch

if TYPE_CHECKING:
    from .qsa_triton import KernelStep


@dataclass(frozen=True)
class Step:
    """A batch of rows on its way through the layers.

    Attributes:
        batch: the rows.
        config: of the model.
        tables: block tables of the cache.
    """

    batch: RowBatch
    config: Qwen4ExpConfig
    tables: BlockTables

    @cached_property
    def rotary(self) -> tuple[Tensor, Tensor]:
        """cos and sin ``[N, rotary_dim]`` of the rows' positions, FP32."""
        return rotary_cos_sin(self.batch.positions, self.config.rotary_dim, self.config.rope_theta)

    @cached_property
    def kernels(self) -> KernelStep:
        """Inputs of the Triton kernels; built when the first layer asks."""
        from .qsa_triton import KernelStep  # Triton does not exist on every platform that runs the reference

        return KernelStep.of(self.batch, self.tables, self.config)
