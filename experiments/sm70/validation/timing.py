"""Times of calls that find what the predictions assume: an L2 full of another kernel's dirty lines."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from page4.experiments.bench.machine import Launches, Machine
from page4.experiments.gpu_timing import Timing, copy_bandwidth

_WRITER_BYTES = 2**30  # takes about a millisecond, in which the host enqueues the call that is timed
_MEMORY_SHARE = 0.8


def time_behind_writer(launches: Launches, writer: Callable[[], object], replays: int) -> Timing:
    """Time of a call between two events, right behind a kernel that writes more than L2 holds.

    The host enqueues the writer, an event, the call and an event, while the writer runs: so the GPU never
    waits for the host. Events and launching are in the time, about as long as an empty call takes.

    Args:
        launches: calls of equal work, in turn; each is called once before.
        writer: enqueues the kernel that writes.
        replays: samples, each of one call.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    times = []
    for number in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        writer()
        start.record()
        launches[number % len(launches)]()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return Timing.of(times)


def validation_machine(replays: int) -> Machine:
    """The current GPU, timed behind a writer; ``launch_us`` is that of a kernel that does next to nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth = copy_bandwidth(device)
    buffer = torch.empty(_WRITER_BYTES, dtype=torch.uint8, device=device)
    timer = functools.partial(time_behind_writer, writer=lambda: buffer.fill_(1), replays=replays)
    small = torch.zeros(1, device=device)
    return Machine(
        device=device,
        timer=timer,
        copy_bandwidth=bandwidth,
        launch_us=timer([lambda: small.add_(1)]).median_us,
        cold_copies=lambda bytes_per_launch: 1,  # the writer leaves nothing of them in the caches
        memory_bytes=int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]),
    )
