"""The machine that a bench runs on: where, how it is timed, and the measured ceilings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from page4.experiments.gpu_timing import Timing, cold_copies, copy_bandwidth, time_launches

Launches = Sequence[Callable[[], object]]

_MEMORY_SHARE = 0.6  # of the free memory that the copies of a case may take


@dataclass(frozen=True)
class Machine:
    """What a bench asks of its machine.

    Attributes:
        device: of all tensors.
        timer: time per launch of callables that do the same work, each on its own copy of the inputs.
        copy_bandwidth: bytes per second, read and written, of a copy: the roof over large cells.
        launch_us: microseconds of a kernel that does next to nothing: the roof over small cells.
        cold_copies: copies that keep caches cold, from the bytes of a launch.
        memory_bytes: that the copies of a case may take.
    """

    device: torch.device
    timer: Callable[[Launches], Timing]
    copy_bandwidth: float
    launch_us: float
    cold_copies: Callable[[int], int]
    memory_bytes: int

    @classmethod
    def gpu(cls, replays: int) -> Machine:
        """The current CUDA device, its ceilings measured now.

        Raises:
            InputError: there is none.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        timer = functools.partial(time_launches, replays=replays)
        bandwidth = copy_bandwidth(device)
        small = torch.zeros(1, device=device)
        return cls(
            device=device,
            timer=timer,
            copy_bandwidth=bandwidth,
            launch_us=timer([functools.partial(small.add_, 1)]).median_us,
            cold_copies=functools.partial(cold_copies, device=device),
            memory_bytes=int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]),
        )
