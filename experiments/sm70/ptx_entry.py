"""What a driver must know to launch PTX that Triton wrote: the kernel's name, and its parameters' types."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_TYPES: dict[str, type[Any]] = {
    "u64": ctypes.c_uint64, "u32": ctypes.c_uint32, "u16": ctypes.c_uint16, "u8": ctypes.c_uint8,
    "b64": ctypes.c_uint64, "b32": ctypes.c_uint32, "b16": ctypes.c_uint16, "b8": ctypes.c_uint8,
    "f32": ctypes.c_float, "f64": ctypes.c_double,
}  # fmt: skip
_SCRATCH = 2  # pointers that Triton adds: scratch memory of the program, and of a profiler
_ENTRY = re.compile(r"\.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)", re.DOTALL)
_PARAMETER = re.compile(r"\.param \.(\w+) ")
_VERSION = re.compile(r"^\.version \d+\.\d+$", re.MULTILINE)


@dataclass(frozen=True)
class EntryPoint:
    """A kernel in PTX.

    Attributes:
        name: of the function.
        parameters: types such as ``u64``; the last two are pointers to scratch memory.
        threads: of a program.
    """

    name: str
    parameters: tuple[str, ...]
    threads: int

    def packed(self, values: Sequence[Any]) -> list[Any]:
        """The parameters for these values of the run-time arguments; tensors become addresses.

        Raises:
            ValueError: more or fewer values than parameters, or one that its parameter cannot hold.
        """
        if len(values) + _SCRATCH != len(self.parameters):
            raise ValueError(
                f"{self.name} has {len(self.parameters) - _SCRATCH} arguments, got {len(values)} values"
            )
        return [_packed(kind, value) for kind, value in zip(self.parameters, [*values, 0, 0], strict=True)]


def entry_point(ptx: str) -> EntryPoint:
    """The only kernel of a PTX text.

    Raises:
        ValueError: it has none or several, or uses scratch memory, which nobody would allocate.
    """
    found = _ENTRY.findall(ptx)
    if len(found) != 1:
        raise ValueError(f"the PTX has {len(found)} kernels, not one")
    name, parameters, threads = found[0]
    kinds = tuple(_PARAMETER.findall(parameters))
    for place in range(len(kinds) - _SCRATCH, len(kinds)):
        if f"[{name}_param_{place}]" in ptx:
            raise ValueError(f"{name} uses scratch memory")
    return EntryPoint(name, kinds, int(threads))


def as_old_ptx(ptx: str) -> str:
    """The same PTX as version 6.4, the first with ``mma.m8n8k4``, which every driver takes."""
    text, changed = _VERSION.subn(".version 6.4", ptx)
    if changed != 1:
        raise ValueError("the PTX does not say its version")
    return text


def _packed(kind: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.data_ptr()
    to = _TYPES[kind]
    packed = to(value)
    if kind[0] != "f":
        bits = 8 * ctypes.sizeof(to)
        if not -(1 << (bits - 1)) <= value < 1 << bits:
            raise ValueError(f"{value} does not fit into {kind}")
    return packed
