"""Launches a V100's code on the GPU that is there: kernels' PTX for sm_70, compiled for it by the driver."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from page4.experiments.sm70.compiling import Binary, Compiler
from page4.experiments.sm70.driver import Driver
from page4.experiments.sm70.launches import Launch, replaced_launches
from page4.experiments.sm70.pretend_gpu import GPUS, answers_of
from page4.kernels.tuning import use_configurations

CAPABILITY = 70
Watch = Callable[[Launch, Binary, list[Any], Callable[[], None]], None]


def launch_by_driver(launch: Launch, compiler: Compiler, driver: Driver, watch: Watch | None = None) -> None:
    """Launch once, with the arguments that the launcher passes.

    ``watch`` gets the launch, its code, the values of its run-time arguments and what executes it.
    """
    job = launch.job(CAPABILITY)
    binary = compiler.compile(job)
    values = [launch.arguments[name] for name in job.signature]

    def execute() -> None:
        stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
        driver.launch(binary.ptx, values, launch.grid, binary.shared_bytes, stream)

    if watch is None:
        execute()
    else:
        watch(launch, binary, values, execute)


@contextmanager
def driver_launches(compiler: Compiler, driver: Driver, watch: Watch | None = None) -> Iterator[list[Launch]]:
    """Within the block, launchers see a V100, and what they launch goes through the driver; yields it."""
    launches: list[Launch] = []

    def execute(launch: Launch) -> None:
        launches.append(launch)
        launch_by_driver(launch, compiler, driver, watch)

    forget()
    try:
        with answers_of(GPUS[CAPABILITY]), use_configurations("defaults"), replaced_launches(execute):
            yield launches
    finally:
        forget()


def forget() -> None:
    """Forget what kernels' launchers remember about devices."""
    for name, module in list(sys.modules.items()):
        if name.startswith("page4.kernels."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
