"""The time of a launch on a V100, predicted from the machine code of some of its blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import Program
from page4.experiments.sm70.predictor.caches import Lines
from page4.experiments.sm70.predictor.launch import copied_grid, sample_blocks
from page4.experiments.sm70.predictor.lowering import lower_program, lower_trace
from page4.experiments.sm70.predictor.machine import V100, Machine
from page4.experiments.sm70.predictor.pipes import Pipe
from page4.experiments.sm70.predictor.sm_model import Replay, replay
from page4.experiments.sm70.predictor.static_report import StaticReport, static_report
from page4.experiments.sm70.trace import Trace
from page4.kernels.errors import InputError

Place = tuple[int, int, int]

LATENCY_BELOW = 0.6
"""A launch that takes no resource for this share of its time waits for latencies."""


@dataclass(frozen=True)
class Geometry:
    """How a kernel is launched, and how much of the launch is emulated.

    Attributes:
        grid: blocks along x, y and z.
        warps: of a block.
        shared_bytes: of a block.
        axis: of the grid that counts what there are many equal ones of, such as requests; 0 for x.
        part: places along the axis that the arguments hold data for; the others repeat them on other data.
            All by default.
        most_blocks: at most so many blocks are emulated, evenly spread over those places.

    Raises:
        InputError: a number below 1, or a part larger than the grid.
    """

    grid: Place
    warps: int
    shared_bytes: int
    axis: int = 0
    part: int = 0
    most_blocks: int = 256

    def __post_init__(self) -> None:
        """Take the whole grid where no part is given, and refuse what is no launch."""
        if self.part == 0:
            object.__setattr__(self, "part", self.grid[self.axis])
        numbers = (*self.grid, self.warps, self.most_blocks, self.part)
        if min(numbers) < 1 or self.part > self.grid[self.axis]:
            raise InputError(f"{self} is no launch: all numbers are at least 1 and part at most the grid")

    @property
    def blocks(self) -> int:
        """Of the launch."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def traced_grid(self) -> list[int]:
        """The grid with only ``part`` places along the axis."""
        return [self.part if axis == self.axis else size for axis, size in enumerate(self.grid)]

    def sampled(self) -> NDArray[np.int64]:
        """The blocks that are emulated, as places in :attr:`traced_grid`, x fastest."""
        x, y, z = self.traced_grid
        return sample_blocks(x * y * z, self.most_blocks)

    def sample(self) -> list[Place]:
        """The same along x, y and z."""
        x, y, z = np.unravel_index(self.sampled(), self.traced_grid, order="F")
        return list(zip(x.tolist(), y.tolist(), z.tolist(), strict=True))


@dataclass(frozen=True)
class Prediction:
    """A launch on a V100. Predicted, never measured.

    Attributes:
        us: microseconds from the first instruction to the last result; launching is not included.
        bound: what was taken for the largest share of the time: ``DRAM``, ``L2``, ``issue`` or a pipe's name;
            ``latency`` where that is less than 60 %.
        shares: of the time, by resource.
        static: registers, spills, occupancy and instructions.
        replay: what was counted.
        blocks, emulated_blocks: of the launch, and those whose traces stand for all.
        emulate_s, replay_s: seconds that the prediction took.
    """

    us: float
    bound: str
    shares: dict[str, float]
    static: StaticReport
    replay: Replay
    blocks: int
    emulated_blocks: int
    emulate_s: float
    replay_s: float


def predict(
    program: Program,
    geometry: Geometry,
    trace_blocks: Callable[[Sequence[Place]], Trace],
    machine: Machine = V100,
    l2: Lines | None = None,
) -> Prediction:
    """Emulate a sample of a launch's blocks, and replay all blocks.

    Args:
        program: the kernel.
        geometry: of the launch.
        trace_blocks: traces the blocks at the given places of the grid, in this order.
        machine: the GPU.
        l2: what L2 holds, changed in place; by default another kernel's dirty lines.

    Raises:
        InputError: not even one block fits on a multiprocessor.
        EmulationError: the emulator cannot run the program on these arguments.
    """
    static = static_report(program, geometry.shared_bytes, geometry.warps)
    began = time.perf_counter()
    trace = trace_blocks(geometry.sample())
    emulated = time.perf_counter()
    traces, blocks = copied_grid(
        lower_trace(program, trace), geometry.sampled(), geometry.grid, geometry.axis, geometry.part
    )
    result = replay(
        machine,
        lower_program(program),
        traces,
        blocks,
        geometry.warps,
        static.occupancy.blocks,
        geometry.shared_bytes,
        l2,
    )
    shares = resource_shares(result, machine)
    largest = max(shares, key=shares.__getitem__)
    return Prediction(
        us=1e6 * result.cycles / machine.clock_hz,
        bound=largest if shares[largest] >= LATENCY_BELOW else "latency",
        shares=shares,
        static=static,
        replay=result,
        blocks=geometry.blocks,
        emulated_blocks=len(trace.blocks),
        emulate_s=emulated - began,
        replay_s=time.perf_counter() - emulated,
    )


def resource_shares(result: Replay, machine: Machine) -> dict[str, float]:
    """For what share of a replay's time each resource was taken."""
    seconds = result.cycles / machine.clock_hz
    shares = {pipe.name: result.busy[pipe] for pipe in Pipe}
    shares["issue"] = result.issued / (result.cycles * 4 * machine.multiprocessors)
    shares["L2"] = result.l2_bytes / (seconds * machine.l2_bytes_per_second)
    moved = result.read_bytes + result.written_bytes
    shares["DRAM"] = moved / (seconds * machine.dram_bytes_per_second)
    return shares
