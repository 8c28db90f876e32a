"""Cases of a Gated DeltaNet layer's decode step, with the public model's heads whatever the other shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from page4.experiments.kernel_cases import DRAFT_TOKENS, StepShape
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights
from page4.kernels.recurrent_rows import RequestRows

KEY_HEADS, VALUE_HEADS, HEAD_DIM, TAPS = 16, 48, 128, 4


@dataclass(frozen=True)
class DeltaStepInputs:
    """One call of :func:`~page4.kernels.gated_delta_triton.gated_delta_triton`, by its names."""

    inputs: DeltaInputs
    weights: DeltaWeights
    ring: torch.Tensor
    state: torch.Tensor
    rows: RequestRows
    every_row: bool
    eps: float
    out: torch.Tensor


def delta_inputs(shape: StepShape, device: torch.device | str = "cpu") -> DeltaStepInputs:
    """A call for a step's requests and rows, which keeps the state after every row; without values.

    Rings and slots are those of a model with drafts, even where the step verifies none.
    """

    def half(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float16, device=device)

    def whole(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, device=device)

    requests, rows, slots = shape.requests, shape.total_rows, _slots(shape)
    channels, width = _channels(), VALUE_HEADS * HEAD_DIM
    return DeltaStepInputs(
        inputs=DeltaInputs(
            half(rows, channels), half(rows, VALUE_HEADS), half(rows, VALUE_HEADS), half(rows, width)
        ),
        weights=DeltaWeights(half(channels, TAPS), half(VALUE_HEADS), half(VALUE_HEADS), half(HEAD_DIM)),
        ring=half(requests, TAPS - 1 + slots, channels),
        state=torch.empty(requests, slots, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device=device),
        rows=RequestRows(whole(requests), whole(requests), whole(rows), shape.rows),
        every_row=True,
        eps=1e-6,
        out=half(rows, width),
    )


def delta_copies(
    shape: StepShape, device: torch.device | str, seed: int = 0, copies: int = 1
) -> list[DeltaStepInputs]:
    """Cases with normal numbers and weak decay, at the end of the context, each with its own weights."""
    generator = torch.Generator(device).manual_seed(seed)
    made = [delta_inputs(shape, device) for _ in range(copies)]
    for case in made:
        for tensor in (*vars(case.inputs).values(), *vars(case.weights).values(), case.ring):
            tensor.normal_(generator=generator)
        case.weights.conv.mul_(0.5)
        case.weights.dt_bias.sub_(4)  # states outlive the step, so that errors in them show
        case.weights.norm.add_(1)
        # Slots that are not read hold nothing that may count.
        case.state.fill_(torch.nan)[:, 0].normal_(std=0.1, generator=generator)
        case.rows.requests.copy_(torch.arange(shape.requests, device=device))
        case.rows.read_slots.zero_()
        first = shape.context - shape.rows
        row = torch.arange(shape.total_rows, device=device)
        case.rows.positions.copy_(first + row % shape.rows)
    return made


def delta_bytes(shape: StepShape) -> int:
    """Bytes that no call can avoid: a state in, one out for every row, projections, output and ring."""
    states = 4 * _state() * shape.requests * (1 + shape.rows)
    row = _channels() + 2 * VALUE_HEADS * (1 + HEAD_DIM)  # read or written
    ring = _channels() * (TAPS - 1 + shape.rows)
    return states + 2 * (shape.total_rows * row + shape.requests * ring)


def delta_memory(shape: StepShape) -> int:
    """Bytes of a call's inputs and output, all but weights."""
    states = 4 * _state() * shape.requests * _slots(shape)
    row = _channels() + 2 * VALUE_HEADS * (1 + HEAD_DIM)
    ring = _channels() * (TAPS - 1 + _slots(shape))
    return states + 2 * (shape.total_rows * row + shape.requests * ring)


def _channels() -> int:
    return (2 * KEY_HEADS + VALUE_HEADS) * HEAD_DIM


def _state() -> int:
    """Values of one request and slot."""
    return VALUE_HEADS * HEAD_DIM * HEAD_DIM


def _slots(shape: StepShape) -> int:
    return max(shape.rows, DRAFT_TOKENS + 1)
