"""``wgmma`` of Hopper GPUs for :mod:`tests.kernels.ptx_emulator`: operands, and when they may be touched.

Semantics follow NVIDIA's PTX ISA. A warpgroup, 128 threads, multiplies 64 rows A in registers with N columns
B in shared memory. A descriptor tells where B lies: in a grid of pieces, eight rows of 16 to 128 bytes each,
whose 16-byte chunks are swizzled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

WARPGROUP = 128
STEP = 16  # length of the sum of one instruction, in FP16 numbers
_SWIZZLE_BYTES = (16, 128, 64, 32)  # by mode; 16 is none


@dataclass(frozen=True)
class Descriptor:
    """Where B lies: byte offsets between pieces in its two directions, and the bytes of a piece's row."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def decode(cls, word: int) -> Descriptor:
        """Of the 64 bits that the instruction takes; no base offset, so pieces must be aligned."""
        start, leading, stride = (16 * (word >> bit & 0x3FFF) for bit in (0, 16, 32))
        decoded = cls(start, leading, stride, _SWIZZLE_BYTES[word >> 62])
        assert decoded.encode() == word, "a base offset, or bits without a meaning"
        return decoded

    def encode(self) -> int:
        """The 64 bits."""
        mode = _SWIZZLE_BYTES.index(self.swizzle)
        return self.start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | mode << 62

    def addresses(self, columns: int, transposed: bool) -> Array:
        """Bytes ``[16, columns]`` in shared memory where the FP16 numbers of B lie.

        Not ``transposed``: a row of a piece holds adjacent numbers of one sum, else adjacent columns.
        """
        k, n = np.arange(STEP)[:, None], np.arange(columns)[None, :]
        row, along = (k, n) if transposed else (n, k)
        width = self.swizzle // 2
        # Without a swizzle pieces are 8 numbers wide, and the two offsets change roles when transposed.
        across, down = (self.leading, self.stride)
        if transposed and self.swizzle == 16:
            across, down = down, across
        if not transposed and self.swizzle > 16:
            across = self.swizzle  # one piece holds the whole sum
            assert width >= STEP
        linear = self.start + along // width * across + along % width * 2
        linear = linear + row // 8 * down + row % 8 * self.swizzle
        return linear ^ (linear >> 3 & (self.swizzle - 16))


def product(a: Array, b: Array, before: Array | None) -> Array:
    """Registers ``[128, N / 2]`` FP32 of ``A B + before``, from words ``[128, 4]`` and FP16 ``[16, N]``."""
    # [warp, lane / 4, lane % 4, half of the sum, half of the rows, value of the pair]
    left = np.ascontiguousarray(a).view(np.float16).reshape(4, 8, 4, 2, 2, 2).astype(np.float64)
    total = left.transpose(0, 4, 1, 3, 2, 5).reshape(64, STEP) @ b.astype(np.float64)
    # [warp, half of the rows, lane / 4, repeat of 8 columns, lane % 4, value of the pair]
    after = total.reshape(4, 2, 8, -1, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(WARPGROUP, -1)
    return (after if before is None else after + before).astype(np.float32)


@dataclass
class _Group:
    """Instructions that are waited for together."""

    sums: dict[str, Array] = field(default_factory=dict)  # accumulator -> what it will hold
    sources: set[str] = field(default_factory=set)  # registers of A
    reads: list[Array] = field(default_factory=list)  # bytes of shared memory


class InFlight:
    """Products that were started and not yet waited for, and the registers and bytes that are theirs."""

    def __init__(self) -> None:
        self.groups = [_Group()]  # the last one is open
        self.sums: dict[str, Array] = {}
        self.registers: set[str] = set()

    def start(self, sums: dict[str, Array], sources: set[str], reads: Array) -> None:
        """Add a product to the open group."""
        group = self.groups[-1]
        group.sums |= sums
        group.sources |= sources
        group.reads.append(reads.reshape(-1))
        self._take()

    def commit(self) -> None:
        """Close the open group."""
        self.groups.append(_Group())

    def wait(self, left: int) -> tuple[dict[str, Array], Array]:
        """Accumulators that are done, and bytes read, when at most ``left`` closed groups are unfinished."""
        finished = max(0, len(self.groups) - 1 - left)
        done: dict[str, Array] = {}
        reads = [np.empty(0, np.int64)]
        for group in self.groups[:finished]:
            done |= group.sums
            reads += group.reads
        del self.groups[:finished]
        self._take()
        done = {name: value for name, value in done.items() if name not in self.registers}
        return done, np.unique(np.concatenate(reads))

    def reads_any(self, places: Array) -> bool:
        """Whether one of the bytes may still be read."""
        return any(np.isin(places, reads).any() for group in self.groups for reads in group.reads)

    def _take(self) -> None:
        self.sums = {name: value for group in self.groups for name, value in group.sums.items()}
        self.registers = set(self.sums).union(*(group.sources for group in self.groups))
