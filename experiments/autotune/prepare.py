"""The prepare kernel (norms, rotation, quantisation, page writes) as something to tune."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from page4.experiments.autotune.machine import Machine
from page4.experiments.autotune.problem import Check, Problem
from page4.experiments.kernel_cases import INDEX_HEADS, PrepareInputs, StepShape, prepare_copies
from page4.kernels.qsa_prepare_triton import PrepareConfig, default_prepare_config, qsa_prepare_triton
from page4.kernels.tunable import PrepareKey

_CONTEXT = 256
_RARE = 1e-3  # share of codes and last places that the order of a sum may decide


class PrepareProblem(Problem):
    """Everything between projections and attention, in one launch."""

    name = "qsa_prepare_triton"

    def possible(self, step: StepShape) -> bool:
        """FP32 projections are never tuned for."""
        return step.kv_format != "fp32"

    def key(self, step: StepShape) -> PrepareKey:
        """The key of the step's inputs."""
        return PrepareKey(
            rows=step.total_rows,
            query_heads=step.query_heads,
            kv_heads=step.kv_heads,
            head_dim=step.head_dim,
            index_heads=INDEX_HEADS,
            index_dim=step.index_dim,
            kv_format=step.kv_format,
        )

    def copies(self, step: StepShape, device: torch.device, seed: int, copies: int) -> list[PrepareInputs]:
        """Inputs over one pool of pages; the kernel reads no context, so that requests can be short."""
        context = min(step.context, max(step.rows, _CONTEXT))
        return prepare_copies(replace(step, context=context), device, seed, copies)

    def bytes_moved(self, inputs: PrepareInputs) -> int:
        """Queries and index keys read and written, K and V read and written in their format."""
        read = inputs.q_gate.numel() // 2 + inputs.index.numel()
        kv = 2 * inputs.k.numel()
        return 2 * 2 * read + (2 + inputs.storage.k_pages.element_size()) * kv

    def default(self, inputs: PrepareInputs) -> PrepareConfig:
        """The launcher's own."""
        return default_prepare_config(inputs.k.shape[0], inputs.k.device)

    def candidates(self, inputs: PrepareInputs, machine: Machine) -> list[Any]:
        """Up to 16 rows a program."""
        return [PrepareConfig(rows) for rows in (1, 2, 4, 8, 16)]

    def run(self, inputs: PrepareInputs, config: PrepareConfig) -> tuple[Tensor, Tensor]:
        """Call the launcher."""
        return qsa_prepare_triton(**vars(inputs), rows_per_program=config.rows_per_program)

    def check(self, inputs: PrepareInputs) -> Check:
        """Compare with the default configuration: equal but for what the order of a sum decides."""
        expected = self._results(inputs, self.default(inputs))

        def difference(config: Any) -> str | None:
            for name, result in self._results(inputs, config).items():
                unequal = (result != expected[name]).double().mean()
                if not float(unequal) <= _RARE:
                    return f"{name} differs in {100 * float(unequal):.2g} % of its values"
            return None

        return difference

    def _results(self, inputs: PrepareInputs, config: PrepareConfig) -> dict[str, Tensor]:
        """What a call writes: the rows of q and index q, and the slots of the rows' tokens."""
        storage, slots = inputs.storage, inputs.rows.slots
        page, offset = slots // storage.k_pages.shape[2], slots % storage.k_pages.shape[2]
        for pages in (storage.k_pages, storage.v_pages):
            pages[page, :, offset] = torch.full_like(pages[page, :, offset], 0x7F)
        storage.compressed_pages.fill_(0)
        q, index_q = self.run(inputs, config)
        return {
            "q": q,
            "index_q": index_q,
            "K": storage.k_pages[page, :, offset],
            "V": storage.v_pages[page, :, offset],
            "compressed keys": storage.compressed_pages[inputs.rows.block_tables.flatten()].clone(),
        }
