"""The threads of some blocks that run together: registers, predicates and special registers as arrays.

Thread t of the arrays is thread ``t % (32 * warps)`` of block ``t // (32 * warps)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import TRUE_PREDICATE, ZERO_REGISTER, Instruction

from .errors import EmulationError
from .undefined import Undefined

Array = NDArray[Any]

WARP = 32


class Threads:
    """State of all threads.

    Attributes:
        blocks: ``[B, 3]`` int32, the places of the blocks in the grid.
        warps: warps of a block.
        count: N threads in all.
        registers: ``[256, N]`` uint32; the last one is ``RZ``, which nobody writes.
        predicates: ``[8, N]`` bool; the last one is ``PT``.
        undefined: which of them hold what nobody wrote.
        alive: ``[N]`` bool, threads that have not exited.
        lane: ``[N]`` int64, thread of the warp.
        warp: ``[N]`` int64, warp of the block.
        block: ``[N]`` int64, index into ``blocks``.
        constants: bank 0 as bytes.
    """

    def __init__(self, blocks: Array, warps: int, constants: Array) -> None:
        self.blocks, self.warps, self.constants = blocks, warps, constants
        self.count = len(blocks) * warps * WARP
        self.registers = np.zeros((ZERO_REGISTER + 1, self.count), np.uint32)
        self.predicates = np.zeros((TRUE_PREDICATE + 1, self.count), bool)
        self.predicates[TRUE_PREDICATE] = True
        self.undefined = Undefined(self.count)
        self.alive = np.ones(self.count, bool)
        place = np.arange(self.count)
        self.lane = place % WARP
        self.warp = place // WARP % warps
        self.block = place // (WARP * warps)
        self._thread = place % (WARP * warps)
        self._special: dict[str, Array] = {}

    def restart(self, blocks: Array) -> None:
        """Begin again with as many other blocks."""
        self.blocks = blocks
        self.registers[:] = 0
        self.predicates[:TRUE_PREDICATE] = False
        self.undefined.restart()
        self.alive[:] = True
        for name, value in self._special.items():
            value[...] = self._special_value(name)

    def special(self, name: str) -> Array:
        """``[N]`` uint32, a special register such as ``SR_TID.X``; later blocks get theirs in the same array.

        Raises:
            KeyError: it is not known.
        """
        if name not in self._special:
            self._special[name] = self._special_value(name)
        return self._special[name]

    def _special_value(self, name: str) -> Array:
        if name in ("SRZ", "SR_TID.Y", "SR_TID.Z"):  # blocks have one dimension, as Triton launches them
            return np.zeros(self.count, np.uint32)
        if name == "SR_TID.X":
            return self._thread.astype(np.uint32)
        if name == "SR_LANEID":
            return self.lane.astype(np.uint32)
        if name in _LANE_MASKS:
            other = np.arange(WARP, dtype=np.int64)
            bits = _LANE_MASKS[name](other[None, :], self.lane[:, None]) << other
            return bits.sum(1).astype(np.uint32)
        axis = {"SR_CTAID.X": 0, "SR_CTAID.Y": 1, "SR_CTAID.Z": 2}[name]
        return self.blocks[self.block, axis].astype(np.uint32)

    def ballots(self, mask: Array) -> Array:
        """``[warps in all]`` uint32, a mask of threads as one word per warp."""
        return np.packbits(mask.reshape(-1, WARP), axis=1, bitorder="little").view("<u4")[:, 0]

    def members(self, ballots: Array) -> Array:
        """The mask of threads that words per warp stand for."""
        words = np.ascontiguousarray(ballots, "<u4").view(np.uint8).reshape(-1, 4)
        return np.unpackbits(words, axis=1, bitorder="little").reshape(-1).astype(bool)

    def fail(self, instruction: Instruction, wrong: Array, message: str) -> EmulationError:
        """The error of the first thread of a mask."""
        thread = int(np.argmax(wrong))
        block = tuple(int(x) for x in self.blocks[self.block[thread]])
        return EmulationError(
            f"{instruction.text} at {instruction.address:#x}, block {block}, thread {self._thread[thread]}: "
            f"{message}"
        )


_LANE_MASKS = {
    "SR_EQMASK": np.equal,
    "SR_LTMASK": np.less,
    "SR_LEMASK": np.less_equal,
    "SR_GTMASK": np.greater,
    "SR_GEMASK": np.greater_equal,
}
