"""The interpreter's CPU as a machine to tune on: real kernels, timed by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from page4.experiments.autotune.config import AutotuneConfig
from page4.experiments.autotune.machine import Machine
from page4.experiments.autotune.problem import Cell
from page4.experiments.autotune.problems import PROBLEMS
from page4.experiments.kernel_cases import StepShape

CPU = torch.device("cpu")
# With a GPU, tests do not set up the interpreter, and kernels cannot take CPU tensors.
NEEDS_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels on the interpreter's CPU")
SHAPE = (1, 2, 2, 1, 32, 20, 0.5)
OTHER_SHAPE = (2, 1, 2, 1, 32, 12, 0.5)


class Clock:
    """Wall-clock times of calls, and how many were asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, launches: Sequence[Callable[[], object]]) -> float:
        self.calls += 1
        started = time.perf_counter()
        for launch in launches:
            launch()
        return 1e6 * (time.perf_counter() - started) / len(launches)


def cpu_machine(
    clock: Clock | None = None, now: Callable[[], float] = time.monotonic, copies: int = 2
) -> Machine:
    return Machine(CPU, "cpu", 1, 2**20, clock or Clock(), cold_copies=lambda size: copies, now=now)


def small_config(**changes: object) -> AutotuneConfig:
    values: dict[str, object] = {
        "kernels": ("page4_attention_triton",),
        "shapes": (SHAPE,),
        "kv_formats": ("e4m3",),
        "processes": 1,
    }
    return AutotuneConfig(**values | changes)  # type: ignore[arg-type]


def small_step(**changes: object) -> StepShape:
    values: dict[str, object] = {
        "requests": 2,
        "rows": 3,
        "query_heads": 6,
        "kv_heads": 2,
        "head_dim": 32,
        "context": 71,
        "overlap": 0.5,
        "kv_format": "e4m3",
        "topk": 6,
    }
    return StepShape(**values | changes)  # type: ignore[arg-type]


def small_cell(kernel: str = "page4_attention_triton", **changes: object) -> Cell:
    return Cell(PROBLEMS[kernel], small_step(**changes))
