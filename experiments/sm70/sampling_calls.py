"""Calls of the launchers that verify and sample drafts, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from page4.experiments.sm70.step_inputs import ROWS
from page4.kernels.draft_sampling import DraftDistributions
from page4.kernels.draft_sampling_triton import DraftWorkspace, sample_drafts_triton
from page4.kernels.mtp_verify_triton import VerifyWorkspace, verify_triton
from page4.kernels.sampling_params import SamplingParams

REQUESTS = 64
VOCABULARY = 248320  # of the public model
USUAL_ROWS = 4


def sampling_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each call with what it does in words: greedy, sampled and constrained tokens, FP16 logits."""
    for rows in ROWS:
        yield f"verify rows {rows} x{REQUESTS}, greedy drafts", partial(_verify, rows)
    for rows in (1, USUAL_ROWS):
        yield f"verify rows {rows} x{REQUESTS}, sampled drafts", partial(_verify, rows, sampled=True)
    yield (
        f"verify rows {USUAL_ROWS} x{REQUESTS}, allowed tokens",
        partial(_verify, USUAL_ROWS, sampled=True, constrained=True),
    )
    yield f"draft x{REQUESTS}, greedy", _draft
    yield f"draft x{REQUESTS}, sampled", partial(_draft, sampled=True)


def _verify(rows: int, sampled: bool = False, constrained: bool = False) -> None:
    drafts = rows - 1
    logits = torch.empty(REQUESTS, rows, VOCABULARY, dtype=torch.float16)
    words = torch.empty(REQUESTS, rows, -(-VOCABULARY // 32), dtype=torch.int32)
    verify_triton(
        logits,
        torch.empty(REQUESTS, drafts, dtype=torch.int64),
        torch.empty(REQUESTS, dtype=torch.int64),
        _params(sampled),
        VerifyWorkspace.allocate(REQUESTS, drafts, VOCABULARY),
        DraftDistributions.empty(logits[:, 0], drafts) if sampled else None,
        words if constrained else None,
    )


def _draft(sampled: bool = False) -> None:
    logits = torch.empty(REQUESTS, VOCABULARY, dtype=torch.float16)
    sample_drafts_triton(
        logits,
        torch.empty(REQUESTS, dtype=torch.int64),
        _params(sampled),
        DraftWorkspace.allocate(REQUESTS, VOCABULARY),
        DraftDistributions.empty(logits, USUAL_ROWS - 1) if sampled else None,
    )


def _params(sampled: bool) -> SamplingParams:
    temperature = [float(sampled)] * REQUESTS
    return SamplingParams.of(temperature, draft_temperature=temperature)
