"""What a launcher launches: every kernel with its grid and arguments, recorded in the kernel's place."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from page4.experiments.sm70.compiling import Job

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
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
    """Within the block, kernels of ``page4.kernels`` are not launched but noted in the list it yields."""
    launches: list[Launch] = []
    with ExitStack() as patches:
        for module_name, module in sorted(sys.modules.items()):
            if module_name.startswith("page4.kernels."):
                for name, value in list(vars(module).items()):
                    if _is_jitted(value):
                        recorder = _Recorder(value, launches)
                        patches.enter_context(mock.patch.object(module, name, recorder))
        yield launches


class _Recorder:
    """Takes the place of a jitted function."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **named: Any) -> None:
            names = self._kernel.arg_names
            arguments = dict(zip(names, values, strict=False))
            arguments |= {name: named.pop(name) for name in names if name in named}
            options = {n: v for n, v in named.items() if v is not None and n not in _LAUNCH_ONLY}
            ordered = {name: arguments[name] for name in names}
            self._launches.append(Launch(self._kernel, grid, ordered, options))

        return launch


def _is_jitted(value: Any) -> bool:
    return hasattr(value, "arg_names") and hasattr(value, "fn")


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
