"""Launches Triton kernels as machine code of compute capability 7.0 on the emulator.

Where there is no GPU, kernels run under Triton's interpreter. This takes its place: a launch compiles the
kernel for its arguments as Triton would, and executes it over the very tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from page4.experiments.sm70.assembly import Program, parse
from page4.experiments.sm70.compiling import Binary, Compiler
from page4.experiments.sm70.emulator import Argument, Buffer, Run, run
from page4.experiments.sm70.launches import Launch, replaced_launches

CAPABILITY = 70
DEFAULT_WARPS = 4  # Triton's


@contextmanager
def emulated_launches(compiler: Compiler) -> Iterator[list[Run]]:
    """While this is open, kernels run on the emulator; yields what happened in each launch."""
    runs: list[Run] = []

    def execute(launch: Launch) -> None:
        job = launch.job(CAPABILITY)
        values = [launch.arguments[name] for name in job.signature]
        runs.append(emulate(compiler, compiler.compile(job), launch, values))

    with replaced_launches(execute):
        yield runs


def emulate(compiler: Compiler, binary: Binary, launch: Launch, values: list[Any]) -> Run:
    """Execute a launch's machine code with these values of its run-time arguments, tensors on the CPU."""
    x, y, z = (*launch.grid, 1, 1)[:3]
    return run(
        _parsed(compiler, binary.cubin),
        grid=(x, y, z),
        warps=launch.options.get("num_warps", DEFAULT_WARPS),
        arguments=[_argument(value) for value in values],
        shared_bytes=binary.shared_bytes,
    )


def _argument(value: Any) -> Argument:
    if not isinstance(value, Tensor):
        return value  # type: ignore[no-any-return]
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())  # type: ignore[call-overload]
    return Buffer(storage.numpy(), offset=value.storage_offset() * value.element_size())


@functools.cache
def _parsed(compiler: Compiler, cubin: bytes) -> Program:
    return parse(compiler.toolchain.disassemble(cubin))


__all__ = ["Run", "emulate", "emulated_launches"]
