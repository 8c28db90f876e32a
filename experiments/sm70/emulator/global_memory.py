"""Global memory: the kernel's arrays, each in a range of addresses of its own, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from page4.kernels.errors import InputError

Array = NDArray[Any]

RANGE_BYTES = 2**40  # between the first bytes of two arrays
_SHIFT = 40


@dataclass(frozen=True)
class Buffer:
    """An array in global memory.

    Attributes:
        array: what the kernel reads and writes in place; contiguous.
        written: False for memory of which nothing has been written yet, such as outputs and workspaces: what
            the kernel reads there before it writes it is undefined.
        offset: of the byte whose address is passed; what lies before it can be reached too.
    """

    array: Array
    written: bool = True
    offset: int = 0


class GlobalMemory:
    """Loads and stores by address.

    Errors are raised through ``fail(wrong, message)``, which gets the accesses at fault.
    """

    def __init__(self) -> None:
        self._bytes: list[Array] = []
        self._words: list[Array] = []  # the whole 32-bit words of each array
        self._undefined: list[Array | None] = []  # per array, ones for bits that nobody wrote

    def add(self, buffer: Buffer) -> int:
        """Map an array, each piece of memory once; returns the address to pass."""
        if not buffer.array.flags.c_contiguous or not buffer.array.flags.writeable:
            raise InputError("arrays of the emulator must be contiguous and writable; pass a copy")
        data = buffer.array.reshape(-1).view(np.uint8)
        for number, known in enumerate(self._bytes, 1):
            if known.ctypes.data == data.ctypes.data and len(known) == len(data) > 0:
                return number * RANGE_BYTES + buffer.offset
        self._bytes.append(data)
        self._words.append(data[: len(data) // 4 * 4].view(np.uint32))
        undefined = None if buffer.written else np.full(len(data) // 4 + 1, 0xFFFFFFFF, np.uint32)
        self._undefined.append(undefined)
        return len(self._bytes) * RANGE_BYTES + buffer.offset

    def pieces(self, addresses: Array, size: int, fail: Callable[[Array, str], Exception]) -> list[Piece]:
        """The accesses ``[n]`` of ``size`` bytes, by array."""
        owner = addresses >> _SHIFT
        if not len(addresses):
            return []
        first = int(owner[0])
        numbers = [first] if (owner == first).all() else [int(number) for number in np.unique(owner)]
        found = []
        for number in numbers:
            which = None if len(numbers) == 1 else owner == number
            places = addresses if which is None else addresses[which]
            if not 1 <= number <= len(self._bytes):
                wrong = owner == number
                raise fail(wrong, f"global address {int(places[0]):#x} belongs to no array")
            offsets = places - (number << _SHIFT)
            length = len(self._bytes[number - 1])
            if int(offsets.max()) + size > length:
                wrong = (owner == number) & (addresses - (number << _SHIFT) + size > length)
                offset = int(offsets[offsets + size > length][0])
                raise fail(
                    wrong,
                    f"bytes {offset} to {offset + size - 1} of array {number - 1} (counted from 0), "
                    f"which has {length}",
                )
            if size > 1 and (offsets & (size - 1)).any():
                wrong = addresses & (size - 1) != 0
                raise fail(wrong, f"global address {int(addresses[wrong][0]):#x} is not a multiple of {size}")
            found.append(
                Piece(
                    which, offsets, self._bytes[number - 1], self._words[number - 1],
                    self._undefined[number - 1], number - 1,
                )
            )  # fmt: skip
        return found


@dataclass(frozen=True)
class Piece:
    """Accesses to one array.

    Attributes:
        which: ``[n]`` bool, which of the instruction's accesses these are, or None: all.
        offsets: int64, first bytes.
        data: the array as uint8.
        words: its whole words as uint32.
        undefined: per word, ones for bits that nobody wrote, or None: all is written.
        number: of the array.
    """

    which: Array | None
    offsets: Array
    data: Array
    words: Array
    undefined: Array | None
    number: int

    def load(self, size: int) -> list[Array]:
        """uint32 per register of the access."""
        if size >= 4:
            first = self.offsets >> 2
            return [self.words[first + word] for word in range(size // 4)]
        data = self.data if size == 1 else self.data[: len(self.data) // 2 * 2].view(np.uint16)
        return [data[self.offsets >> (size // 2)].astype(np.uint32)]

    def store(self, size: int, values: list[Array]) -> None:
        """Write uint32 per register of the access."""
        if size >= 4:
            first = self.offsets >> 2
            for word, value in enumerate(values):
                self.words[first + word] = value
        elif size == 2:
            self.data[: len(self.data) // 2 * 2].view(np.uint16)[self.offsets >> 1] = values[0].astype(
                np.uint16
            )
        else:
            self.data[self.offsets] = values[0].astype(np.uint8)

    def load_undefined(self, size: int) -> list[Array] | None:
        """Undefined bits per register; None where there are none."""
        return None if self.undefined is None else load_marks(self.undefined, self.offsets, size)

    def store_defined(self, size: int) -> None:
        """What was stored is defined."""
        if self.undefined is not None:
            store_marks(self.undefined, self.offsets, size, None)


def load_marks(marks: Array, offsets: Array, size: int) -> list[Array] | None:
    """Undefined bits of accesses at byte offsets, uint32 per register; None where all are defined."""
    first = offsets >> 2
    if size >= 4:
        found = [marks[first + word] for word in range(size // 4)]
    else:
        inside = (offsets & 3).astype(np.uint32) << np.uint32(3)
        found = [marks[first] >> inside & np.uint32((1 << 8 * size) - 1)]
    return found if any(mask.any() for mask in found) else None


def store_marks(marks: Array, offsets: Array, size: int, undefined: list[Array] | None) -> None:
    """Set undefined bits; None: all are defined."""
    first = offsets >> 2
    if size >= 4:
        for word in range(size // 4):
            marks[first + word] = 0 if undefined is None else undefined[word]
        return
    inside = (offsets & 3).astype(np.uint32) << np.uint32(3)
    own = np.uint32((1 << 8 * size) - 1)
    value = np.zeros(len(first), np.uint32) if undefined is None else undefined[0] & own
    np.bitwise_and.at(marks, first, ~(own << inside))  # several threads may write bytes of one word
    np.bitwise_or.at(marks, first, value << inside)
