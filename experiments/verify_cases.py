"""Cases of the verification of drafts: logits of all rows of a step, over the public model's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.experiments.kernel_cases import StepShape
from page4.kernels.mtp_verify_triton import VerifyWorkspace
from page4.kernels.sampling_params import SamplingParams

VOCABULARY = 248320  # of the public model
_PERIOD = 2**20  # random numbers, over and over


@dataclass(frozen=True)
class VerifyInputs:
    """One call of :func:`~page4.kernels.mtp_verify_triton.verify_triton` with greedy drafts, by its names."""

    logits: Tensor
    drafts: Tensor
    positions: Tensor
    params: SamplingParams
    workspace: VerifyWorkspace
    accepted: Tensor
    emitted: Tensor


def verify_inputs(shape: StepShape, device: torch.device | str = "cpu") -> VerifyInputs:
    """A call for a step's requests and rows, one of them no draft, at temperature 1; without values."""
    requests, drafts = shape.requests, shape.rows - 1
    return VerifyInputs(
        logits=torch.empty(requests, shape.rows, VOCABULARY, dtype=torch.float16, device=device),
        drafts=torch.empty(requests, drafts, dtype=torch.int64, device=device),
        positions=torch.empty(requests, dtype=torch.int64, device=device),
        params=SamplingParams.of([1.0] * requests, seed=range(requests), device=device),
        workspace=VerifyWorkspace.allocate(requests, drafts, VOCABULARY, device),
        accepted=torch.empty(requests, dtype=torch.int64, device=device),
        emitted=torch.empty(requests, shape.rows, dtype=torch.int64, device=device),
    )


def verify_copies(
    shape: StepShape, device: torch.device | str, seed: int = 0, copies: int = 1
) -> list[VerifyInputs]:
    """Cases with normal logits; each draft is its row's most likely token, which is often accepted."""
    generator = torch.Generator(device).manual_seed(seed)
    made = [verify_inputs(shape, device) for _ in range(copies)]
    numbers = 4 * torch.randn(_PERIOD, generator=generator, device=device)
    for inputs in made:
        flat = inputs.logits.view(-1)
        for start in range(0, len(flat), _PERIOD):
            flat[start : start + _PERIOD] = numbers[: len(flat) - start]
        # One token of every row stands out, another one in every row.
        row = torch.arange(shape.total_rows, device=device)
        likely = (row * 7919) % VOCABULARY
        inputs.logits.view(shape.total_rows, -1)[row, likely] = 32.0
        inputs.drafts.copy_(likely.view(shape.requests, shape.rows)[:, :-1])
        inputs.positions.copy_(torch.arange(shape.requests, device=device) + shape.context - shape.rows)
    return made


def verify_bytes(shape: StepShape) -> int:
    """Bytes that no call can avoid: every logit is read once."""
    return 2 * shape.total_rows * VOCABULARY
