"""What the bench knows of a case: launches, their check, and the bytes that no launch can avoid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from page4.experiments.bench.machine import Launches
from page4.experiments.bench.reference import Check


@dataclass(frozen=True)
class Contender:
    """One implementation on the copies of a case.

    Attributes:
        name: of the implementation.
        launches: one per copy of the inputs.
        check: runs the last copy's launch and compares what it writes with float64, or exactly where the
            result is exact.
        detail: its configuration in words.
        chosen: whether the model gets this implementation on this machine.
    """

    name: str
    launches: Launches
    check: Callable[[], Check]
    detail: str = ""
    chosen: bool = True


@dataclass(frozen=True)
class Case:
    """A cell with its inputs.

    Attributes:
        floor_bytes: bytes that a launch cannot avoid to move.
        contenders: implementations that can run the cell.
        copies: of the inputs, through which the launches rotate.
        cold: whether they are enough to keep caches cold.
        absent: implementations that cannot run the cell, and why.
    """

    floor_bytes: int
    contenders: list[Contender]
    copies: int
    cold: bool
    absent: dict[str, str] = field(default_factory=dict)


def settings(config: Any) -> str:
    """A kernel's configuration, a dataclass, in words: ``splits 4, num_warps 8``."""
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())
