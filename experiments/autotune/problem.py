"""What tuning must know of a kernel, and the cells that it works through: a kernel at a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from page4.experiments.autotune.machine import Machine
from page4.experiments.autotune.outline import Outline
from page4.experiments.kernel_cases import StepShape
from page4.kernels.tunable import TUNABLE

Check = Callable[[Any], str | None]

_MOST_COPIES = 256  # inputs of which more would fit into the caches are as good as always there


class Problem(ABC):
    """A tunable kernel: its inputs at a step, its candidates, its launch, and what is right.

    Attributes:
        name: of the kernel, as in `TUNABLE`.
    """

    name: str

    def possible(self, step: StepShape) -> bool:
        """Whether the kernel can run the step."""
        return True

    @abstractmethod
    def key(self, step: StepShape) -> Any:
        """What a configuration for the step is recorded under: the key of its inputs."""

    @abstractmethod
    def copies(self, step: StepShape, device: torch.device, seed: int, copies: int) -> list[Any]:
        """Inputs that do the same work on memory of their own."""

    @abstractmethod
    def bytes_moved(self, inputs: Any) -> int:
        """Bytes that a call cannot do without, about."""

    @abstractmethod
    def default(self, inputs: Any) -> Any:
        """The configuration that the kernel decides by rule."""

    @abstractmethod
    def candidates(self, inputs: Any, machine: Machine) -> list[Any]:
        """Configurations worth trying."""

    @abstractmethod
    def run(self, inputs: Any, config: Any) -> Any:
        """Call the kernel."""

    @abstractmethod
    def check(self, inputs: Any) -> Check:
        """A function that says what is wrong with the results of a configuration, or None.

        What is right is found out when the function is made.
        """


@dataclass(frozen=True)
class Cell:
    """A kernel at a step: what gets one recorded configuration."""

    problem: Problem
    step: StepShape

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.problem.name

    @property
    def key(self) -> Any:
        """What the configuration is recorded under."""
        return self.problem.key(self.step)

    def __str__(self) -> str:
        step = self.step
        heads = f"{step.query_heads}/{step.kv_heads} heads of {step.head_dim}"
        return (
            f"{self.kernel}, {step.requests} x {step.rows}, {heads}, {step.context} tokens, {step.kv_format}"
        )


@dataclass(frozen=True)
class Candidates:
    """What is to be compiled for a cell: configurations, the default one first, and an outline of inputs."""

    configs: tuple[Any, ...]
    default: Any
    outline: Outline

    @classmethod
    def of(cls, cell: Cell, machine: Machine, seed: int) -> Candidates:
        """The configurations to try for a cell, every one of them possible."""
        (inputs,) = cell.problem.copies(cell.step, machine.device, seed, 1)
        default = cell.problem.default(inputs)
        configs = tuple(dict.fromkeys([default, *cell.problem.candidates(inputs, machine)]))
        for config in configs:
            TUNABLE[cell.kernel].check(cell.key, config)
        return cls(configs, default, Outline.of(inputs))


class Bench:
    """Inputs of a cell on the device, enough copies of them for cold caches, and what is right.

    Attributes:
        inputs: the copies.
        difference: what is wrong with the results of a configuration on the first copy, or None.
    """

    def __init__(self, cell: Cell, machine: Machine, seed: int) -> None:
        self._run = cell.problem.run
        self.inputs = cell.problem.copies(cell.step, machine.device, seed, 1)
        copies = min(_MOST_COPIES, machine.cold_copies(cell.problem.bytes_moved(self.inputs[0])))
        if copies > 1:
            self.inputs = cell.problem.copies(cell.step, machine.device, seed, copies)
        self.difference = cell.problem.check(self.inputs[0])

    def launches(self, config: Any) -> list[Callable[[], object]]:
        """One call for every copy of the inputs."""
        return [_Launch(self._run, inputs, config) for inputs in self.inputs]


@dataclass(frozen=True)
class _Launch:
    run: Callable[[Any, Any], Any]
    inputs: Any
    config: Any

    def __call__(self) -> object:
        return self.run(self.inputs, self.config)
