"""Compilation of many configurations in parallel processes, which share Triton's cache on the disk."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from page4.experiments.autotune.outline import Outline
from page4.experiments.autotune.problems import PROBLEMS


@dataclass(frozen=True)
class Compiled:
    """Whether a configuration compiled.

    Attributes:
        error: why not, in one line.
        spills: registers that spill to local memory.
        device_lost: the launch left the process without a usable device.
    """

    error: str | None = None
    spills: int = 0
    device_lost: bool = False


def compile_configuration(kernel: str, outline: Outline, config: Any, device: torch.device) -> Compiled:
    """Compile all that a kernel launches for inputs with an outline, and load it on the device."""
    functions = compiled_functions()
    for function in functions:
        function.device_caches.clear()  # afterwards they hold what this configuration needs, and no more
    try:
        PROBLEMS[kernel].run(outline.zeros(device), config)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # compilers raise anything
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Compiled(error=message, device_lost=not _usable(device))
    caches = (cache for function in functions for cache, *_ in function.device_caches.values())
    return Compiled(spills=max((binary.n_spills for cache in caches for binary in cache.values()), default=0))


def _usable(device: torch.device) -> bool:
    """Whether a process can still use its device; after an access to a wrong address it never can."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def compiled_functions() -> list[Any]:
    """Triton's functions in the kernels' modules; none under the interpreter, which compiles nothing."""
    modules = [module for name, module in sys.modules.items() if name.startswith("page4.kernels.")]
    found = {id(value): value for module in modules for value in vars(module).values()}
    return [value for value in found.values() if hasattr(value, "device_caches")]


Compile = Callable[[str, Outline, Any, torch.device], Compiled]


class CompilerPool:
    """Processes that compile; one that crashes takes only its own configuration with it.

    Args:
        processes: How many; 0 means one per processor but one.
        device: The device to compile for and to load on.
        compile: What a process runs; a function that can be imported there.
    """

    def __init__(
        self, processes: int, device: torch.device, compile: Compile = compile_configuration
    ) -> None:
        processes = processes or max(1, (os.cpu_count() or 1) - 1)
        self._device, self._compile = device, compile
        self._threads = ThreadPoolExecutor(processes)
        self._local = threading.local()  # every thread has a process of its own
        self._processes: list[ProcessPoolExecutor] = []

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Forget what has not begun; what has begun is waited for."""
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.shutdown()

    def submit(self, kernel: str, outline: Outline, config: Any) -> Future[Compiled]:
        """Compile a configuration when a process is free; the first ones submitted come first."""
        return self._threads.submit(self._run, kernel, outline, config)

    def _run(self, kernel: str, outline: Outline, config: Any) -> Compiled:
        process: ProcessPoolExecutor | None = getattr(self._local, "process", None)
        if process is None:
            # A forked process could not use CUDA.
            context = multiprocessing.get_context("spawn")
            process = ProcessPoolExecutor(1, context, initializer=_ignore_interrupts)
            self._local.process = process
            self._processes.append(process)
        try:
            compiled = process.submit(self._compile, kernel, outline, config, self._device).result()
        except BrokenProcessPool:
            compiled = Compiled(error="the compiler crashed", device_lost=True)
        if compiled.device_lost:
            self._local.process = None  # the next configuration gets a new one
        return compiled


def _ignore_interrupts() -> None:
    """An interrupt reaches the whole group of processes; the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
