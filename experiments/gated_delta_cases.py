"""Cases of a Gated DeltaNet layer's steps, with the public model's heads whatever the other shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from page4.experiments.kernel_cases import DRAFT_TOKENS, StepShape
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights
from page4.kernels.recurrent_rows import RequestRows

KEY_HEADS, VALUE_HEADS, HEAD_DIM, TAPS = 16, 48, 128, 4


@dataclass(frozen=True)
class DeltaPromptInputs:
    """One call of :func:`~page4.kernels.gated_delta_dispatch.prefill_gated_delta`, by its names."""

    inputs: DeltaInputs
    weights: DeltaWeights
    ring: torch.Tensor
    state: torch.Tensor
    rows: RequestRows
    eps: float
    out: torch.Tensor


@dataclass(frozen=True)
class DeltaStepInputs(DeltaPromptInputs):
    """One call of :func:`~page4.kernels.gated_delta_triton.gated_delta_triton`, by its names."""

    every_row: bool


def delta_inputs(shape: StepShape, device: torch.device | str = "cpu") -> DeltaStepInputs:
    """A call for a step's requests and rows, which keeps the state after every row; without values.

    Rings and slots are those of a model with drafts, even where the step verifies none.
    """
    return DeltaStepInputs(**_call(shape.requests, shape.rows, _slots(shape.rows), device), every_row=True)


def prompt_inputs(requests: int, rows: int, device: torch.device | str = "cpu") -> DeltaPromptInputs:
    """A call for equally many rows of prompts; without values. Rings and slots as for a decode step."""
    return DeltaPromptInputs(**_call(requests, rows, DRAFT_TOKENS + 1, device))


def delta_copies(
    shape: StepShape, device: torch.device | str, seed: int = 0, copies: int = 1
) -> list[DeltaStepInputs]:
    """Cases with normal numbers and weak decay, at the end of the context, each with its own weights."""
    generator = torch.Generator(device).manual_seed(seed)
    made = [delta_inputs(shape, device) for _ in range(copies)]
    for case in made:
        _fill(case, shape, generator)
    return made


def prompt_copies(
    shape: StepShape, device: torch.device | str, seed: int = 0, copies: int = 1
) -> list[DeltaPromptInputs]:
    """The same for prompts, or their last rows where there is more context."""
    generator = torch.Generator(device).manual_seed(seed)
    made = [prompt_inputs(shape.requests, shape.rows, device) for _ in range(copies)]
    for case in made:
        _fill(case, shape, generator)
    return made


def delta_bytes(shape: StepShape) -> int:
    """Bytes that no call can avoid: a state in, one out for every row, projections, output and ring."""
    return _bytes(shape, states=1 + shape.rows, places=TAPS - 1 + shape.rows)


def prompt_bytes(shape: StepShape) -> int:
    """Bytes that no call can avoid: a state in and one out, projections, output and ring."""
    capacity = TAPS + DRAFT_TOKENS
    past = min(TAPS - 1, shape.context - shape.rows)
    return _bytes(shape, states=2, places=past + min(shape.rows, capacity))


def delta_memory(shape: StepShape) -> int:
    """Bytes of a call's inputs and output, all but weights."""
    slots = _slots(shape.rows)
    return _bytes(shape, states=slots, places=TAPS - 1 + slots)


def prompt_memory(shape: StepShape) -> int:
    """The same for prompts."""
    return _bytes(shape, states=DRAFT_TOKENS + 1, places=TAPS + DRAFT_TOKENS)


def _call(requests: int, rows: int, slots: int, device: torch.device | str) -> dict[str, Any]:
    def half(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float16, device=device)

    def whole(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, device=device)

    total, channels, width = requests * rows, _channels(), VALUE_HEADS * HEAD_DIM
    return {
        "inputs": DeltaInputs(
            half(total, channels), half(total, VALUE_HEADS), half(total, VALUE_HEADS), half(total, width)
        ),
        "weights": DeltaWeights(half(channels, TAPS), half(VALUE_HEADS), half(VALUE_HEADS), half(HEAD_DIM)),
        "ring": half(requests, TAPS - 1 + slots, channels),
        "state": torch.empty(requests, slots, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device=device),
        "rows": RequestRows(whole(requests), whole(requests), whole(total), rows),
        "eps": 1e-6,
        "out": half(total, width),
    }


def _fill(case: DeltaPromptInputs, shape: StepShape, generator: torch.Generator) -> None:
    for tensor in (*vars(case.inputs).values(), *vars(case.weights).values(), case.ring):
        tensor.normal_(generator=generator)
    case.weights.conv.mul_(0.5)
    case.weights.dt_bias.sub_(4)  # states outlive the step, so that errors in them show
    case.weights.norm.add_(1)
    # Slots that are not read hold nothing that may count.
    case.state.fill_(torch.nan)[:, 0].normal_(std=0.1, generator=generator)
    device = case.state.device
    case.rows.requests.copy_(torch.arange(shape.requests, device=device))
    case.rows.read_slots.zero_()
    row = torch.arange(shape.total_rows, device=device)
    case.rows.positions.copy_(shape.context - shape.rows + row % shape.rows)


def _bytes(shape: StepShape, states: int, places: int) -> int:
    """Bytes of so many states and places of the ring a request, and of all rows."""
    row = _channels() + 2 * VALUE_HEADS * (1 + HEAD_DIM)  # read or written
    caches = 4 * _state() * states + 2 * _channels() * places
    return caches * shape.requests + 2 * shape.total_rows * row


def _channels() -> int:
    return (2 * KEY_HEADS + VALUE_HEADS) * HEAD_DIM


def _state() -> int:
    """Values of one request and slot."""
    return VALUE_HEADS * HEAD_DIM * HEAD_DIM


def _slots(rows: int) -> int:
    return max(rows, DRAFT_TOKENS + 1)
