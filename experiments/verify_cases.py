"""Cases of the verification of drafts: logits of all rows of a step, over the public model's vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from page4.experiments.kernel_cases import StepShape
from page4.kernels.draft_sampling import DraftDistributions, sample_drafts_reference
from page4.kernels.mtp_verify_triton import VerifyWorkspace
from page4.kernels.sampling_params import SamplingParams

VOCABULARY = 248320  # of the public model
_SPREAD = 3.0  # standard deviation of the logits

Choice = Literal["greedy", "sampled", "filtered"]
"""How requests choose: greedily, by sampling after greedy drafts, or with filters, their drafts too."""


@dataclass(frozen=True)
class VerifyInputs:
    """One call of :func:`~page4.kernels.mtp_verify_triton.verify_triton`, by its names."""

    logits: Tensor
    drafts: Tensor
    positions: Tensor
    params: SamplingParams
    workspace: VerifyWorkspace
    distributions: DraftDistributions | None
    accepted: Tensor
    emitted: Tensor


def verify_inputs(
    shape: StepShape,
    device: torch.device | str = "cpu",
    choice: Choice = "sampled",
    workspace: VerifyWorkspace | None = None,
) -> VerifyInputs:
    """A call for a step's requests and rows, one of them no draft; without values.

    ``filtered`` keeps a few tokens, of the drafts' distributions too.
    """
    requests, drafts = shape.requests, shape.rows - 1
    logits = torch.empty(requests, shape.rows, VOCABULARY, dtype=torch.float16, device=device)
    sampled = choice == "filtered" and drafts > 0
    return VerifyInputs(
        logits=logits,
        drafts=torch.empty(requests, drafts, dtype=torch.int64, device=device),
        positions=torch.empty(requests, dtype=torch.int64, device=device),
        params=_params(requests, choice, device),
        workspace=workspace or VerifyWorkspace.allocate(requests, drafts, VOCABULARY, device),
        distributions=DraftDistributions.empty(logits[:, 0], drafts) if sampled else None,
        accepted=torch.empty(requests, dtype=torch.int64, device=device),
        emitted=torch.empty(requests, shape.rows, dtype=torch.int64, device=device),
    )


def verify_copies(
    shape: StepShape,
    device: torch.device | str,
    seed: int = 0,
    copies: int = 1,
    choice: Choice = "sampled",
) -> list[VerifyInputs]:
    """Cases with normal logits and one workspace; drafts are accepted and rejected about as often.

    One token of every row has about three quarters of the probability. Of greedy drafts three quarters are
    that token, sampled ones come from logits near the target's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    workspace = VerifyWorkspace.allocate(shape.requests, shape.rows - 1, VOCABULARY, device)
    made = [verify_inputs(shape, device, choice, workspace) for _ in range(copies)]
    for inputs in made:
        inputs.logits.normal_(std=_SPREAD, generator=generator)
        size = inputs.logits.shape[:2]
        likely = torch.randint(0, VOCABULARY, size, generator=generator, device=device)
        other = torch.randint(0, VOCABULARY, size, generator=generator, device=device)
        others = math.log(VOCABULARY) + _SPREAD**2 / 2  # logarithm of the sum of their exponentials
        inputs.logits.scatter_(2, likely[..., None], math.log(3) + others)
        coins = torch.rand(size, generator=generator, device=device) < 0.75
        inputs.drafts.copy_(torch.where(coins, likely, other)[:, :-1])
        inputs.positions.copy_(torch.arange(shape.requests, device=device) + shape.context - shape.rows)
        if inputs.distributions is not None:
            for step in range(shape.rows - 1):
                noise = torch.randn(shape.requests, VOCABULARY, generator=generator, device=device)
                near = (inputs.logits[:, step].float() + noise).half()
                inputs.drafts[:, step] = sample_drafts_reference(
                    near, inputs.positions + step, inputs.params, inputs.distributions, step
                )
    return made


def verify_bytes(shape: StepShape, choice: Choice = "sampled") -> int:
    """Bytes that no call can avoid: every logit is read once, with filters one row of a draft's a request."""
    drafted = shape.requests if choice == "filtered" and shape.rows > 1 else 0
    return 2 * VOCABULARY * (shape.total_rows + drafted)


def verify_memory(shape: StepShape, choice: Choice = "sampled") -> int:
    """Bytes of a call's logits, the drafts' included."""
    drafted = shape.requests * (shape.rows - 1) if choice == "filtered" else 0
    return 2 * VOCABULARY * (shape.total_rows + drafted)


def _params(requests: int, choice: Choice, device: torch.device | str) -> SamplingParams:
    seeds = range(requests)
    if choice != "filtered":
        return SamplingParams.of([float(choice == "sampled")] * requests, seed=seeds, device=device)
    every = [0.8] * requests
    return SamplingParams.of(
        every, draft_temperature=every, top_k=[50] * requests, top_p=[0.95] * requests, seed=seeds,
        device=device,
    )  # fmt: skip
