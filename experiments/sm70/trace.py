"""What the warps of a kernel did, as arrays: the emulator writes it, the predictor replays it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SECTOR_BYTES = 32  # what one request to the second-level cache moves


@dataclass(frozen=True)
class Trace:
    """Every instruction that every warp issued, warp after warp, the warps of a block together.

    Event e is one instruction of one warp. Sectors are addresses of global and local memory in units of 32
    bytes, each once per event, ascending. Every array that the kernel was given has addresses of its own, and
    local memory lies apart from all of them.

    Attributes:
        warps_per_block: warps of a block.
        blocks: ``[B, 3]`` int32, the places of the traced blocks in the grid.
        warp_starts: ``[B * warps_per_block + 1]`` int64: warp w of block b issued the events from
            ``warp_starts[b * warps_per_block + w]`` to the next entry, in this order.
        instructions: ``[E]`` int32, indices into ``Program.instructions``.
        lanes: ``[E]`` uint8, threads for which the instruction had an effect: 0 where its predicate held for
            none.
        sector_starts: ``[E + 1]`` int64: event e touched
            ``sectors[sector_starts[e] : sector_starts[e + 1]]``.
        sectors: ``[S]`` int64.
        wavefronts: ``[E]`` uint8, passes that shared memory takes for the access, bank conflicts included; 0
            where the instruction is no access to shared memory or has no effect. Without conflicts, 4, 8 and
            16 bytes a thread take 1, 2 and 4.
    """

    warps_per_block: int
    blocks: Array
    warp_starts: Array
    instructions: Array
    lanes: Array
    sector_starts: Array
    sectors: Array
    wavefronts: Array

    @property
    def events(self) -> int:
        """Instructions that warps issued."""
        return len(self.instructions)

    def counts(self, instructions: int) -> Array:
        """``[instructions]`` int64: how often each instruction of the program was issued."""
        return np.bincount(self.instructions, minlength=instructions)
