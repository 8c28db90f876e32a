"""Cases of a Gated DeltaNet layer's decode step, with the public model's heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from page4.experiments.kernel_cases import DRAFT_TOKENS, StepShape
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights
from page4.kernels.recurrent_rows import RequestRows

KEY_HEADS, VALUE_HEADS, HEAD_DIM, TAPS = 16, 48, 128, 4
_CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD_DIM
_WIDTH = VALUE_HEADS * HEAD_DIM
_STATE = VALUE_HEADS * HEAD_DIM * HEAD_DIM  # values of one request and slot


@dataclass(frozen=True)
class DeltaStepInputs:
    """One call of :func:`~page4.kernels.gated_delta_triton.gated_delta_triton`, by its names."""

    inputs: DeltaInputs
    weights: DeltaWeights
    ring: torch.Tensor
    state: torch.Tensor
    rows: RequestRows
    every_row: bool
    out: torch.Tensor


def delta_inputs(shape: StepShape, device: torch.device | str = "cpu") -> DeltaStepInputs:
    """A call for a step's requests and rows, which keeps the state after every row; without values."""

    def half(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float16, device=device)

    def whole(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, device=device)

    requests, rows = shape.requests, shape.total_rows
    return DeltaStepInputs(
        inputs=DeltaInputs(
            half(rows, _CHANNELS), half(rows, VALUE_HEADS), half(rows, VALUE_HEADS), half(rows, _WIDTH)
        ),
        weights=DeltaWeights(half(_CHANNELS, TAPS), half(VALUE_HEADS), half(VALUE_HEADS), half(HEAD_DIM)),
        ring=half(requests, TAPS - 1 + DRAFT_TOKENS + 1, _CHANNELS),
        state=torch.empty(requests, DRAFT_TOKENS + 1, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device=device),
        rows=RequestRows(whole(requests), whole(requests), whole(rows), shape.rows),
        every_row=True,
        out=half(rows, _WIDTH),
    )


def delta_copies(
    shape: StepShape, device: torch.device | str, seed: int = 0, copies: int = 1
) -> list[DeltaStepInputs]:
    """Cases with normal numbers, in the middle of a context."""
    generator = torch.Generator(device).manual_seed(seed)
    made = [delta_inputs(shape, device) for _ in range(copies)]
    for case in made:
        for tensor in (*vars(case.inputs).values(), *vars(case.weights).values(), case.ring):
            tensor.normal_(generator=generator)
        case.weights.conv.mul_(0.5)
        case.state.normal_(generator=generator).mul_(0.1)
        case.rows.requests.copy_(torch.arange(shape.requests, device=device))
        case.rows.read_slots.zero_()
        first = shape.context - shape.rows
        row = torch.arange(shape.total_rows, device=device)
        case.rows.positions.copy_(first + row % shape.rows)
    return made


def delta_bytes(shape: StepShape) -> int:
    """Bytes that no call can avoid: a state in, one out for every row, projections, output and ring."""
    states = 4 * _STATE * shape.requests * (1 + shape.rows)
    row = _CHANNELS + 2 * VALUE_HEADS + 2 * _WIDTH  # read or written
    ring = _CHANNELS * (TAPS - 1 + shape.rows)
    return states + 2 * (shape.total_rows * row + shape.requests * ring)
