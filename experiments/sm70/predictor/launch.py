"""A whole launch as its multiprocessors see it: traces of some blocks, and which block runs which trace."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Between the memory of two copies: more than a trace's global addresses span, and no divisor of the distance
# to its local ones.
SECTORS_APART = 2**43 + 2**40

INSTRUCTION = np.dtype(
    [
        ("pipe", "i8"),
        ("kind", "i8"),
        ("cycles", "i8"),  # for which it takes its unit
        ("stall", "i8"),  # cycles until the warp's next instruction may issue
        ("keeps", "i8"),  # 1: the scheduler stays with the warp
        ("write_barrier", "i8"),  # 0..5, or 7 for none: clear when the result is there
        ("read_barrier", "i8"),  # likewise, when the operands are read
        ("wait_mask", "i8"),  # barriers that must be clear before issue
    ]
)
EVENT = np.dtype(
    [
        ("instruction", "i8"),
        ("wavefronts", "i8"),  # cycles of the load/store unit, 1 where it has nothing to do
        ("first_sector", "i8"),  # the next event's is where they end
    ]
)
SECTOR = np.dtype(
    [
        ("address", "i8"),  # over 32
        ("step_x", "i8"),  # sectors by which it moves for one step of the block
        ("step_y", "i8"),
    ]
)
BLOCK = np.dtype(
    [
        ("trace", "i8"),  # index of the block whose trace it runs
        ("x", "i8"),  # steps that its addresses take
        ("y", "i8"),
    ]
)

Records = NDArray[Any]


class Traces(NamedTuple):
    """What the warps of the traced blocks executed, one after the other.

    Attributes:
        warp_start: int64 ``[traced blocks * warps + 1]``, where a warp's events begin.
        events: ``[executed + 1]`` of :data:`EVENT`; the last only ends the sectors of the one before.
        sectors: ``[touched]`` of :data:`SECTOR`.
    """

    warp_start: NDArray[np.int64]
    events: Records
    sectors: Records


def sample_blocks(count: int, most: int) -> NDArray[np.int64]:
    """At most so many of a launch's blocks, evenly spread over their order."""
    if count <= most:
        return np.arange(count)
    return (np.arange(most) * count + count // 2) // most


def copied_grid(
    traces: Traces, sampled: NDArray[np.int64], grid: tuple[int, int, int], axis: int, part: int
) -> tuple[Traces, Records]:
    """A launch whose blocks do the same work on different memory, such as those of equal requests.

    The first ``part`` places along ``axis`` were there to be traced. Other places repeat them, each
    repetition in memory of its own, which its blocks share as those that were traced share theirs. A block
    whose place was not sampled runs the trace of the nearest one that was, in memory that no other touches.

    Args:
        traces: of the sampled blocks.
        sampled: ascending places in a grid with only ``part`` places along the axis, x fastest.
        grid: blocks of the launch along x, y and z.
        axis: 0 for x, 1 for y, 2 for z.
        part: 1..grid[axis].
    """
    count = grid[0] * grid[1] * grid[2]
    place = list(np.unravel_index(np.arange(count), grid, order="F"))
    copy, place[axis] = np.divmod(place[axis], part)
    traced = [part if n == axis else size for n, size in enumerate(grid)]
    index = np.ravel_multi_index(place, traced, order="F")
    middle = (sampled[1:] + sampled[:-1] + 1) // 2
    blocks = np.zeros(count, BLOCK)
    blocks["trace"] = np.searchsorted(middle, index, side="right")
    is_sampled = sampled[blocks["trace"]] == index
    blocks["x"] = np.where(is_sampled, copy, grid[axis] + np.arange(count))
    sectors = traces.sectors.copy()
    sectors["step_x"] = SECTORS_APART
    return traces._replace(sectors=sectors), blocks


def affine_grid(traces: Traces, warps: int, grid: tuple[int, int]) -> tuple[Traces, Records]:
    """A launch over a plane whose blocks differ only in addresses, and in those by a constant a step.

    Args:
        traces: of the blocks (0, 0), (1, 0) and (0, 1), in this order.
        warps: of a block.
        grid: blocks along x and y.

    Raises:
        ValueError: the three blocks do not execute the same instructions on as many sectors.
    """
    corner, along_x, along_y = (_block(traces, warps, index) for index in range(3))
    sectors = corner.sectors.copy()
    for axis, other in (("step_x", along_x), ("step_y", along_y)):
        if not np.array_equal(corner.events, other.events):
            raise ValueError("blocks of an affine launch must execute the same instructions")
        sectors[axis] = other.sectors["address"] - corner.sectors["address"]
    blocks = np.zeros(grid[0] * grid[1], BLOCK)
    blocks["y"], blocks["x"] = np.divmod(np.arange(len(blocks)), grid[0])
    return corner._replace(sectors=sectors), blocks


def _block(traces: Traces, warps: int, index: int) -> Traces:
    """One traced block alone."""
    start = traces.warp_start[index * warps : (index + 1) * warps + 1]
    events = traces.events[start[0] : start[-1] + 1].copy()
    sectors = traces.sectors[events["first_sector"][0] : events["first_sector"][-1]]
    events["first_sector"] -= events["first_sector"][0]
    events[["instruction", "wavefronts"]][-1] = (0, 0)
    return Traces(start - start[0], events, sectors)
