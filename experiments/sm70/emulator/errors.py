"""What the emulator reports."""

from __future__ import annotations

from dataclasses import dataclass

from page4.experiments.sm70.assembly import Instruction


class EmulationError(Exception):
    """The kernel did what no kernel may, or something that the emulator does not know.

    The message names the instruction and its address and, where one thread is to blame, the block and thread.
    """


@dataclass(frozen=True)
class Race:
    """Two warps of a block that met in shared memory without a barrier between them, one of them writing.

    Attributes:
        instruction: the later one of the two accesses.
        kind: ``read after write``, ``write after read`` or ``write after write``.
        block: place of the block in the grid.
        warp: that executed the instruction.
        other_warps: that had written or read there since the last barrier.
        address: of the first byte, in shared memory.
    """

    instruction: Instruction
    kind: str
    block: tuple[int, int, int]
    warp: int
    other_warps: tuple[int, ...]
    address: int
