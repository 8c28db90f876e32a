"""Grouped attention as something to tune: its keys, candidates, launches and results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from page4.experiments.autotune.exact import exact_rows
from page4.experiments.autotune.machine import Machine
from page4.experiments.autotune.outline import Outline
from page4.experiments.autotune.rounds import first_round
from page4.experiments.autotune.space import gluon_candidates, plain_candidates
from page4.experiments.kernel_cases import StepShape, attention_copies, unique_bytes
from page4.kernels.block_plan import plan_capacity
from page4.kernels.page4_attention_dispatch import default_attention_config
from page4.kernels.page4_attention_gluon import (
    GLUON_FORMATS,
    page4_attention_gluon,
    page4_attention_gluon_kernel,
)
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_triton import page4_attention_kernel, page4_attention_triton
from page4.kernels.tunable import TUNABLE, AttentionKey

IMPLEMENTATIONS: dict[str, Literal["gluon", "triton"]] = {
    "page4_attention_gluon": "gluon",
    "page4_attention_triton": "triton",
}
JIT_FUNCTIONS = {
    "page4_attention_gluon": page4_attention_gluon_kernel,
    "page4_attention_triton": page4_attention_kernel,
}


@dataclass(frozen=True)
class Cell:
    """A kernel at a step: what gets one recorded configuration."""

    kernel: str
    step: StepShape

    def __str__(self) -> str:
        step = self.step
        heads = f"{step.query_heads}/{step.kv_heads} heads of {step.head_dim}"
        return (
            f"{self.kernel}, {step.requests} x {step.rows}, {heads}, {step.context} tokens, {step.kv_format}"
        )

    @property
    def possible(self) -> bool:
        """Whether the kernel reads the step's format."""
        return self.step.kv_format in GLUON_FORMATS or IMPLEMENTATIONS[self.kernel] == "triton"

    @property
    def key(self) -> AttentionKey:
        """What the configuration is recorded under: the key of the step's inputs."""
        step = self.step
        capacity = plan_capacity(step.rows_per_group, step.topk, step.max_blocks)
        return AttentionKey(
            groups=step.requests * -(-step.rows // step.rows_per_group),
            rows_per_group=step.rows_per_group,
            heads_per_kv=step.query_heads // step.kv_heads,
            kv_heads=step.kv_heads,
            head_dim=step.head_dim,
            capacity=1 << (capacity - 1).bit_length(),
            kv_format=step.kv_format,
        )


@dataclass(frozen=True)
class Candidates:
    """What is to be compiled for a cell: configurations, the default one among them, and an outline."""

    configs: tuple[Any, ...]
    default: Any
    outline: Outline

    def first_round(self) -> list[Any]:
        """Those to begin with, see `rounds`."""
        return first_round(self.configs, self.default)


def candidates(cell: Cell, machine: Machine, seed: int) -> Candidates:
    """The configurations to try for a cell, every one of them possible."""
    inputs = attention_copies(cell.step, machine.device, seed)[0]
    default = default_attention_config(inputs, IMPLEMENTATIONS[cell.kernel])
    enumerate_all = gluon_candidates if IMPLEMENTATIONS[cell.kernel] == "gluon" else plain_candidates
    found = enumerate_all(inputs, machine.multiprocessors, machine.shared_memory)
    configs = dict.fromkeys([default, *found])
    for config in configs:
        TUNABLE[cell.kernel].check(cell.key, config)
    return Candidates(tuple(configs), default, Outline.of(inputs))


def attend(
    kernel: str, inputs: AttentionInputs, config: Any, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run a kernel with a configuration."""
    if IMPLEMENTATIONS[kernel] == "gluon":
        return page4_attention_gluon(inputs, config, out=out, lse=lse)
    return page4_attention_triton(inputs, config, out=out, lse=lse)


class Bench:
    """Inputs of a cell on the device, enough copies of them for cold caches, and the right results.

    ``cold_copies`` gives the number of copies for the bytes that a call cannot do without.
    """

    def __init__(
        self, cell: Cell, device: torch.device, seed: int, cold_copies: Callable[[int], int]
    ) -> None:
        self._kernel = cell.kernel
        (first,) = attention_copies(cell.step, device, seed)
        copies = cold_copies(unique_bytes(first))
        self.inputs = attention_copies(cell.step, device, seed, copies) if copies > 1 else [first]
        self._exact = exact_rows(self.inputs[0])

    def difference(self, config: Any) -> str | None:
        """What is wrong with the results of a configuration, in words; None if they are right."""
        inputs = self.inputs[0]
        # Whatever is not written is NaN, and NaN is wrong.
        out = torch.full(inputs.q.shape, torch.nan, dtype=inputs.q.dtype, device=inputs.q.device)
        lse = out.new_full(inputs.q.shape[:2], torch.nan, dtype=torch.float32)
        return self._exact.difference(*attend(self._kernel, inputs, config, out, lse))

    def launches(self, config: Any) -> list[Callable[[], object]]:
        """One call for every copy of the inputs."""
        return [functools.partial(attend, self._kernel, inputs, config) for inputs in self.inputs]
