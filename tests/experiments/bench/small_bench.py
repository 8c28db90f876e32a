"""A bench small enough for Triton's interpreter, timed by the clock of the CPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.machine import Launches, Machine
from page4.experiments.gpu_timing import Timing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

SMALL: dict[str, Any] = {
    "bars": False,
    "requests": (2,),
    "rows": (3,),
    "heads": ((4, 2),),
    "contexts": (70,),
    "overlaps": (0.5,),
    "formats": ("e4m3",),
    "prepare_rows": (9,),
    "prefill_lengths": (16,),
    "head_dim": 32,
    "topk": 8,
    "check_groups": 2,
}


def small_config(**changes: Any) -> BenchConfig:
    """Every kernel at one shape, unless changed."""
    return BenchConfig(**SMALL | changes)


def clock(launches: Launches) -> Timing:
    """Each launch once, by the wall clock."""
    times = []
    for launch in launches:
        start = time.perf_counter()
        launch()
        times.append(1e6 * (time.perf_counter() - start))
    return Timing.of(times)


def small_machine(**changes: Any) -> Machine:
    """This machine, with ceilings measured on it."""
    source = torch.ones(2**22, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = clock([lambda: target.copy_(source)] * 5).median_us
    values: dict[str, Any] = {
        "device": DEVICE,
        "timer": clock,
        "copy_bandwidth": 2 * len(source) / (1e-6 * copied),
        "launch_us": clock([lambda: target[:1].add_(1)] * 5).median_us,
        "cold_copies": lambda bytes_per_launch: 2,
        "memory_bytes": 2**30,
    }
    return Machine(**values | changes)
