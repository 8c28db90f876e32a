"""Set-associative caches with lines of 128 bytes in four sectors of 32, as functions on an array of lines.

A sector is named by its address over 32, a line by its address over 128. The array is
``[caches, sets, ways]`` of :data:`LINE`.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

SECTOR_BYTES = 32
LINE_SECTORS = 4
LINE_BYTES = SECTOR_BYTES * LINE_SECTORS

LINE = np.dtype(
    [
        ("tag", "i8"),  # negative: a line of nobody
        ("used", "i8"),  # when it was last touched; the oldest is replaced
        ("dirty", "i8"),  # bit s: sector s must be written back
        ("ready", "i8", (LINE_SECTORS,)),  # cycle from which a sector can be read; ABSENT: it is not there
    ]
)
ABSENT = -1
_ALL_SECTORS = 2**LINE_SECTORS - 1

Lines = NDArray[Any]


def empty_caches(count: int, size_bytes: int, ways: int) -> Lines:
    """Caches of at least one set that hold nothing."""
    lines = np.zeros((count, max(1, size_bytes // (LINE_BYTES * ways)), ways), LINE)
    lines["tag"] = ABSENT
    lines["ready"] = ABSENT
    return lines


def dirty_cache(size_bytes: int, ways: int) -> Lines:
    """One cache full of lines that somebody else wrote: each must be written back when it is replaced."""
    lines = empty_caches(1, size_bytes, ways)
    lines["tag"] = -2 - np.arange(lines.size).reshape(lines.shape)
    lines["ready"] = 0
    lines["dirty"] = _ALL_SECTORS
    return lines


def age_lines(lines: Lines, cycles: int) -> None:
    """Begin to count cycles anew, so many cycles later: all that is there is ready."""
    lines["used"] -= cycles
    lines["ready"] = np.minimum(lines["ready"], 0)


@numba.njit(cache=True)
def set_of(lines, line):
    """The set of a line: a hash of all its bits, as strides of powers of two are common."""
    mixed = np.uint64(line)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed % np.uint64(lines.shape[1]))


@numba.njit(cache=True)
def find_line(lines, index, place, line):
    """The way of a line in a set of cache ``index``, or -1."""
    for way in range(lines.shape[2]):
        if lines[index, place, way].tag == line:
            return way
    return -1


@numba.njit(cache=True)
def replace_line(lines, index, place, line):
    """Give a line the oldest way of its set, without sectors.

    Returns the way and the number of sectors that must be written back for it.
    """
    way = 0
    for other in range(1, lines.shape[2]):
        if lines[index, place, other].used < lines[index, place, way].used:
            way = other
    old = lines[index, place, way]
    written = 0
    for sector in range(LINE_SECTORS):
        written += (old.dirty >> sector) & 1
        old.ready[sector] = ABSENT
    old.tag = line
    old.dirty = 0
    return way, written
