"""Launches Triton kernels as machine code of compute capability 7.0 on the emulator.

Where there is no GPU, kernels run under Triton's interpreter. This takes its place: a launch compiles the
kernel for its arguments as Triton would, and executes it over the very tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from page4.experiments.sm70.assembly import parse
from page4.experiments.sm70.compiling import Binary, Compiler, Job
from page4.experiments.sm70.emulator import Argument, Buffer, Run, run

_TYPES = {
    torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "u8", torch.int8: "i8", torch.int32: "i32",
    torch.int64: "i64", torch.bool: "i1", torch.bfloat16: "bf16",
}  # fmt: skip
_OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "maxnreg"}


@contextmanager
def emulated_launches(compiler: Compiler) -> Iterator[list[Run]]:
    """While this is open, kernels run on the emulator; yields what happened in each launch."""
    runs: list[Run] = []
    interpreted = InterpretedFunction.run

    def launch(kernel: Any, *given: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        options = {name: named.pop(name) for name in list(named) if name in _OPTIONS}
        named = {name: value for name, value in named.items() if name in kernel.arg_names}
        values = dict(zip(kernel.arg_names, given, strict=False)) | named
        places = grid(values) if isinstance(grid, Callable) else grid  # type: ignore[arg-type]
        x, y, z = (*places, 1, 1)[:3]
        runs.append(emulate(compiler, kernel, values, (x, y, z), options))

    InterpretedFunction.run = launch
    try:
        yield runs
    finally:
        InterpretedFunction.run = interpreted


def emulate(
    compiler: Compiler,
    kernel: Any,
    values: dict[str, Any],
    grid: tuple[int, int, int],
    options: dict[str, Any],
) -> Run:
    """Compile a kernel for these arguments and execute it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    arguments: list[Argument] = []
    for parameter in inspect.signature(kernel.fn).parameters.values():
        value = values.get(parameter.name, parameter.default)
        kind = None if "constexpr" in str(parameter.annotation) else _kind(value)
        if kind is None:
            constants[parameter.name] = getattr(value, "value", value)
        else:
            signature[parameter.name] = kind
            arguments.append(_argument(value))
    job = Job(kernel, signature, constants, 70, options)
    program, binary = _program(compiler, job)
    return run(
        program,
        grid=grid,
        warps=options.get("num_warps", 4),
        arguments=arguments,
        shared_bytes=binary.shared_bytes,
    )


def _kind(value: Any) -> str | None:
    """The type that Triton gives an argument; None where it becomes a constant."""
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}" + ("" if value.data_ptr() % 16 == 0 else ":unaligned")
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int) and not isinstance(value, bool) and value != 1:
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        return width + (":16" if value % 16 == 0 else "")
    return None


def _argument(value: Any) -> Argument:
    if not isinstance(value, Tensor):
        return value  # type: ignore[no-any-return]
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())  # type: ignore[call-overload]
    return Buffer(storage.numpy(), offset=value.storage_offset() * value.element_size())


def _program(compiler: Compiler, job: Job) -> tuple[Any, Binary]:
    binary = compiler.compile(job)
    return _parsed(compiler, binary.cubin), binary


@functools.cache
def _parsed(compiler: Compiler, cubin: bytes) -> Any:
    return parse(compiler.toolchain.disassemble(cubin))


__all__ = ["Run", "emulate", "emulated_launches"]
