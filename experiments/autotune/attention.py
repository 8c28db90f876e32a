"""Grouped attention as something to tune, in both implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from page4.experiments.autotune.exact import exact_rows
from page4.experiments.autotune.machine import Machine
from page4.experiments.autotune.problem import Check, Problem
from page4.experiments.autotune.space import gluon_candidates, plain_candidates
from page4.experiments.kernel_cases import StepShape, attention_copies, unique_bytes
from page4.kernels.block_plan import plan_capacity
from page4.kernels.page4_attention_dispatch import default_attention_config
from page4.kernels.page4_attention_gluon import page4_attention_gluon
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_triton import page4_attention_triton
from page4.kernels.tunable import AttentionKey


class AttentionProblem(Problem):
    """Grouped attention in `gluon` or plain `triton`, for the KV formats that it reads."""

    def __init__(self, implementation: Literal["gluon", "triton"], formats: Sequence[str]) -> None:
        self._implementation, self._formats = implementation, formats
        self.name = f"page4_attention_{implementation}"

    def possible(self, step: StepShape) -> bool:
        """Whether the kernel reads the step's format; what was measured with FP32 queries helps no one."""
        return step.kv_format in self._formats

    def key(self, step: StepShape) -> AttentionKey:
        """The key of the step's inputs."""
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

    def copies(self, step: StepShape, device: torch.device, seed: int, copies: int) -> list[AttentionInputs]:
        """Inputs over one pool of pages."""
        return attention_copies(step, device, seed, copies)

    def bytes_moved(self, inputs: AttentionInputs) -> int:
        """Every visible token's K and V once, q, gate, output and lists."""
        return unique_bytes(inputs)

    def default(self, inputs: AttentionInputs) -> Any:
        """The implementation's own."""
        return default_attention_config(inputs, self._implementation)

    def candidates(self, inputs: AttentionInputs, machine: Machine) -> list[Any]:
        """Tiles that have room, with useful numbers of splits."""
        enumerate_all = gluon_candidates if self._implementation == "gluon" else plain_candidates
        return list(enumerate_all(inputs, machine.multiprocessors, machine.shared_memory))

    def run(
        self, inputs: AttentionInputs, config: Any, out: Tensor | None = None, lse: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Call the launcher, merge included."""
        if self._implementation == "gluon":
            return page4_attention_gluon(inputs, config, out=out, lse=lse)
        return page4_attention_triton(inputs, config, out=out, lse=lse)

    def check(self, inputs: AttentionInputs) -> Check:
        """Compare with float64."""
        exact = exact_rows(inputs)

        def difference(config: Any) -> str | None:
            # Whatever is not written is NaN, and NaN is wrong.
            out = torch.full(inputs.q.shape, torch.nan, dtype=inputs.q.dtype, device=inputs.q.device)
            lse = out.new_full(inputs.q.shape[:2], torch.nan, dtype=torch.float32)
            return exact.difference(*self.run(inputs, config, out, lse))

        return difference
