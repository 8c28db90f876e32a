"""Cases of a linear layer's decoding step: all between the projections of a Gated DeltaNet layer.

The layer is the public model's whatever the other shapes of the bench: 48 value heads of 128 x 128 numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.experiments.bench.case import Case, Contender, settings
from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check, sample_groups, worst
from page4.experiments.gated_delta_exact import exact_request
from page4.kernels.gated_delta_triton import (
    DeltaInputs,
    DeltaWeights,
    default_delta_config,
    gated_delta_triton,
)
from page4.kernels.recurrent_rows import RequestRows

KEY_HEADS, VALUE_HEADS, DIM, TAPS = 16, 48, 128, 4
_POSITION, _EPS = 1000, 1e-6


def _channels() -> int:
    return (2 * KEY_HEADS + VALUE_HEADS) * DIM


@dataclass(frozen=True)
class DeltaStep:
    """A launch's inputs: of each request ``rows`` rows, its state in slot 0."""

    inputs: DeltaInputs
    weights: DeltaWeights
    ring: Tensor
    state: Tensor
    rows: RequestRows

    @classmethod
    def random(cls, requests: int, rows: int, device: torch.device, seed: int) -> DeltaStep:
        """Inputs as large as a model's, with FP16 activations."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(size, generator=generator, device=device)).half()

        state = torch.empty(requests, rows, VALUE_HEADS, DIM, DIM, device=device)
        state[:, 0].normal_(std=0.1, generator=generator)
        total, order, channels = requests * rows, torch.arange(requests, device=device), _channels()
        return cls(
            DeltaInputs(
                normal(total, channels), normal(total, VALUE_HEADS), normal(total, VALUE_HEADS),
                normal(total, VALUE_HEADS * DIM),
            ),
            DeltaWeights(
                normal(channels, TAPS, scale=0.5), normal(VALUE_HEADS), normal(VALUE_HEADS) - 4,
                normal(DIM) + 1,
            ),
            normal(requests, TAPS - 1 + rows, channels),
            state,
            RequestRows(order, torch.zeros_like(order), torch.full_like(order, _POSITION).repeat(rows), rows),
        )  # fmt: skip

    def new_out(self) -> Tensor:
        """Space for the rows' outputs."""
        return torch.empty_like(
            self.inputs.mixed[:, : VALUE_HEADS * DIM], memory_format=torch.contiguous_format
        )

    def launch(self, out: Tensor) -> None:
        """The rows' outputs to ``out``, their states to the slots."""
        gated_delta_triton(
            self.inputs, self.weights, self.ring, self.state, self.rows, every_row=True, eps=_EPS, out=out
        )


def gated_delta_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """One launch; floor: the state read once and written after every row, projections in, outputs out."""
    requests, rows = cell.shape.requests, cell.shape.rows
    floor = delta_bytes(requests, rows)
    memory = floor  # its slots are as many as the rows, and it needs inputs and ring besides
    count, cold = choose_copies(machine, floor, memory, config.max_copies)
    copies = [DeltaStep.random(requests, rows, machine.device, config.seed + i) for i in range(count)]
    out = copies[0].new_out()
    checked = sample_groups(requests, config.check_groups, config.seed)
    launches: list[Callable[[], object]] = [functools.partial(step.launch, out) for step in copies]
    check = functools.partial(check_delta, copies[-1], checked, out, launches[-1])
    detail = settings(default_delta_config(DIM, DIM))
    return Case(floor, [Contender("triton", launches, check, detail)], count, cold)


def delta_bytes(requests: int, rows: int) -> int:
    """Bytes that a launch cannot avoid, for FP16 activations."""
    state = 4 * VALUE_HEADS * DIM * DIM * (1 + rows)
    # Rows in, and into the ring, and the rows before them out of it; both gates' inputs; z and the output.
    activations = 2 * (_channels() * (2 * rows + TAPS - 1) + 2 * rows * VALUE_HEADS * (1 + DIM))
    return requests * (state + activations)


def check_delta(step: DeltaStep, requests: list[int], out: Tensor, launch: Callable[[], object]) -> Check:
    """Run the launch, and compare outputs and states of some requests with float64.

    Permitted are two roundings to FP16 for outputs and 1e-5 for FP32 states, relative to the number and to
    the root mean square of its kind.
    """
    rows = step.rows.longest
    before = {request: step.state[request, 0].clone() for request in requests}
    places = [(_POSITION - back) % step.ring.shape[1] for back in range(TAPS - 1, 0, -1)]
    windows = {request: step.ring[request, places].clone() for request in requests}
    out.fill_(torch.nan)
    launch()
    error = 0.0
    for request in requests:
        own = slice(request * rows, (request + 1) * rows)
        parts = (None if x is None else x[own] for x in vars(step.inputs).values())
        inputs = DeltaInputs(*parts)  # type: ignore[arg-type]
        expected = exact_request(inputs, step.weights, windows[request], before[request], _EPS)
        for actual, exact, share in zip(
            (out[own], step.state[request]), expected, (2**-10, 1e-5), strict=True
        ):
            bound = share * (exact.abs() + exact.square().mean().sqrt())
            error = max(error, worst(actual, exact, bound))
    return Check(error, len(requests), step.rows.requests.shape[0])
