"""Times of captured launches, and what is refused without a GPU."""

from __future__ import annotations

import pytest
import torch

from page4.experiments.gpu_timing import Timing, cold_copies, copy_bandwidth, time_launches
from page4.kernels.errors import InputError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU")


def test_a_timing_is_the_median_and_the_outer_tenths() -> None:
    timing = Timing.of([float(value) for value in range(100, -1, -1)])
    assert (timing.p10_us, timing.median_us, timing.p90_us, timing.samples) == (10.0, 50.0, 90.0, 101)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "call", [lambda: time_launches([lambda: None]), lambda: cold_copies(1), copy_bandwidth]
)
def test_without_a_gpu_nothing_is_timed(call: object) -> None:
    with pytest.raises(InputError, match="kernel times need a CUDA GPU"):
        call()  # type: ignore[operator]


@needs_gpu
def test_nothing_to_time_is_refused() -> None:
    with pytest.raises(InputError, match="needs a launch and a replay, got 0 and 30"):
        time_launches([])


@needs_gpu
def test_every_launch_runs_and_twice_the_work_takes_twice_the_time() -> None:
    counters = [torch.zeros(2**24, device="cuda") for _ in range(4)]

    def add(x: torch.Tensor, times: int) -> None:
        for _ in range(times):
            x.add_(1)

    once = time_launches([lambda x=x: add(x, 4) for x in counters], replays=10)  # type: ignore[misc]
    assert all(float(x[0]) >= 4 * 11 for x in counters)  # a warm-up and the replays at least
    twice = time_launches([lambda x=x: add(x, 8) for x in counters], replays=10)  # type: ignore[misc]
    assert once.samples == 10
    assert 1.6 < twice.median_us / once.median_us < 2.4


@needs_gpu
def test_bandwidth_is_plausible_and_copies_exceed_the_cache() -> None:
    assert 1e11 < copy_bandwidth() < 2e13
    assert copy_bandwidth() == copy_bandwidth()
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    assert cold_copies(cache) == 3 and cold_copies(100 * cache) == 1
