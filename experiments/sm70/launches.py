"""What a launcher launches: every kernel with its grid and arguments, recorded in the kernel's place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from page4.experiments.sm70.compiling import Job

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.bool: "*i1",
    torch.bfloat16: "*bf16",
}
_LAUNCH_ONLY = ("launch_pdl",)  # options that leave the code as it is


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: the jitted function.
        grid: programs along each axis.
        arguments: value of every argument by name, in the kernel's order; tensors may be without values.
        options: Triton's.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    def job(self, capability: int) -> Job:
        """What Triton compiles for the launch, specialised to its arguments as it specialises them.

        A run-time integer of 1 becomes a constant, one that 16 divides is known to be.
        """
        parameters = inspect.signature(self.kernel.fn).parameters
        kept = _not_specialised(self.kernel)
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        for name, value in self.arguments.items():
            annotation = parameters[name].annotation
            if value is None or str(annotation).endswith("constexpr"):
                constants[name] = value
            elif isinstance(value, int) and value == 1 and name not in kept:
                constants[name] = 1
            else:
                signature[name] = _type(value, specialise=name not in kept)
        return Job(self.kernel, signature, constants, capability, self.options)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within the block, kernels are not launched but noted in the list it yields."""
    launches: list[Launch] = []
    with replaced_launches(launches.append):
        yield launches


@contextmanager
def replaced_launches(execute: Callable[[Launch], object]) -> Iterator[None]:
    """Within the block, kernels are not launched but given to ``execute``, compiled ones and interpreted."""

    def run(kernel: Any, *values: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        execute(_launch_of(kernel, values, grid, named))

    with ExitStack() as patches:
        for jitted in (JITFunction, InterpretedFunction):
            patches.enter_context(mock.patch.object(jitted, "run", run))
        yield


def _launch_of(kernel: Any, values: Sequence[Any], grid: Any, named: Mapping[str, Any]) -> Launch:
    """What ``kernel[grid](*values, **named)`` launches."""
    given = {**dict(zip(kernel.arg_names, values, strict=False)), **named}
    arguments = {
        name: given.get(name, _value(parameter.default))
        for name, parameter in inspect.signature(kernel.fn).parameters.items()
    }
    missing = [name for name, value in arguments.items() if value is inspect.Parameter.empty]
    if missing:
        raise TypeError(f"{kernel.fn.__name__} is launched without {', '.join(missing)}")
    options = {
        name: value
        for name, value in named.items()
        if name not in arguments and value is not None and name not in _LAUNCH_ONLY
    }
    return Launch(kernel, tuple(grid(arguments) if callable(grid) else grid), arguments, options)


def _value(default: Any) -> Any:
    return getattr(default, "value", default)  # of a constexpr


def _not_specialised(kernel: Any) -> tuple[str, ...]:
    """Arguments that a kernel wants left as they are."""
    given = getattr(kernel, "kwargs", {}).get("do_not_specialize")  # under the interpreter
    return tuple(given or getattr(kernel, "do_not_specialize", None) or ())


def _type(value: Any, specialise: bool) -> str:
    if isinstance(value, Tensor):
        unaligned = value.storage_offset() * value.element_size() % 16
        return _POINTERS[value.dtype] + (":unaligned" if unaligned else "")
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        return f"{kind}:16" if specialise and value % 16 == 0 else kind
    return "fp32"
