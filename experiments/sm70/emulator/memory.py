"""All memory of some blocks, and where the last instruction accessed it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from .global_memory import GlobalMemory
from .local_memory import LocalMemory
from .shared_memory import Report, SharedMemory

Array = NDArray[Any]


@dataclass(frozen=True)
class Access:
    """What one instruction accessed.

    Attributes:
        space: ``global``, ``shared`` or ``local``.
        threads: ``[n]`` that accessed it, or None: all.
        addresses: ``[n]`` int64, first bytes; in local memory those of the thread.
        size: bytes per thread.
    """

    space: str
    threads: Array | None
    addresses: Array
    size: int


@dataclass
class Memory:
    """The three spaces.

    Attributes:
        report: takes a race: its kind, the accesses ``[n]`` at fault and the warps ``[n, warps]`` before
            them.
        last: the access of the last instruction that had one.
    """

    globals: GlobalMemory
    shared: SharedMemory
    local: LocalMemory
    last: Access | None = field(default=None, init=False)


__all__ = ["Access", "Memory", "Report"]
