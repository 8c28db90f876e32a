"""Times of GPU work from CUDA graphs on cold caches, and the copy bandwidth that they are held against."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from page4.kernels.errors import InputError

CACHE_FACTOR = 3  # data that rotates through a cache is cold when it is this many times its size
_SHORTEST_GRAPH_US = 200.0  # events resolve about 0.5 us: less than 0.3 % of this
_COPY_BYTES = (2**28, 2**29, 2**30, 2**31)


@dataclass(frozen=True)
class Timing:
    """Time of one launch in microseconds: median, 10th and 90th percentile over ``samples`` graph replays."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Timing:
        """The summary of at least one sample; percentiles between samples are interpolated."""
        values = torch.tensor(microseconds, dtype=torch.float64)
        p10, median, p90 = values.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return cls(median, p10, p90, len(microseconds))


def time_launches(launches: Sequence[Callable[[], object]], *, replays: int = 30) -> Timing:
    """Time per launch of work that is captured in one CUDA graph.

    Every callable does the same work on its own copy of the inputs, without synchronising with the host. Each
    is called once before the capture (that compiles). The graph holds them one after another, all of them
    several times over if that takes less than 200 us, and is replayed back to back; a sample is the time of a
    replay over the number of launches in the graph. Caches are cold when the copies together exceed
    ``CACHE_FACTOR`` times the L2 cache (:func:`cold_copies`).

    The callables run on the current CUDA device. What they allocate is freed with the graph.

    Raises:
        InputError: no CUDA device, no callable, or no replay.
    """
    _require_cuda()
    if not launches or replays < 1:
        raise InputError(f"timing needs a launch and a replay, got {len(launches)} and {replays}")
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = _capture(launches, passes=1)
    one_pass = Timing.of(_replay_us(graph, 3)).median_us
    passes = math.ceil(_SHORTEST_GRAPH_US / max(one_pass, 0.1))
    if passes > 1:
        del graph
        graph = _capture(launches, passes)
    return Timing.of([time / (passes * len(launches)) for time in _replay_us(graph, replays)])


def cold_copies(bytes_per_launch: int, device: torch.device | str = "cuda") -> int:
    """How many copies of the inputs, at least 1, it takes that none of a launch's bytes are still cached.

    Raises:
        InputError: no CUDA device.
    """
    _require_cuda()
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(CACHE_FACTOR * cache / max(1, bytes_per_launch)))


def copy_bandwidth(device: torch.device | str = "cuda") -> float:
    """Bytes per second, read and written together, of a copy within the device's memory.

    The best of copies of 256 MiB to 2 GiB as far as they fit, measured once per process and device.

    Raises:
        InputError: no CUDA device.
    """
    _require_cuda()
    chosen = torch.device(device)
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    return _copy_bandwidth(index)


@functools.cache
def _copy_bandwidth(index: int) -> float:
    best = 0.0
    with torch.cuda.device(index):
        for size in _COPY_BYTES:
            if 2 * size > torch.cuda.mem_get_info()[0] and best:
                break
            source = torch.ones(size, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            copy = functools.partial(target.copy_, source)
            best = max(best, 2 * size / (time_launches([copy], replays=10).median_us * 1e-6))
            del source, target, copy
    torch.cuda.empty_cache()
    return best


def _capture(launches: Sequence[Callable[[], object]], passes: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for launch in launches:
                launch()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of every replay. The host enqueues ahead of the GPU, so no replay waits for it."""
    graph.replay()  # not counted: the first replay waits for its upload
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise InputError("kernel times need a CUDA GPU, and PyTorch sees none")
