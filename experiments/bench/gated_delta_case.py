"""Cases of a linear layer's decoding step: all between the projections of a Gated DeltaNet layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from page4.experiments.bench.case import Case, Contender, settings
from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check, sample_groups, worst
from page4.experiments.gated_delta_cases import DeltaStepInputs, delta_bytes, delta_copies, delta_memory
from page4.experiments.gated_delta_exact import exact_request
from page4.kernels.gated_delta_triton import DeltaInputs, default_delta_config, gated_delta_triton

_OUTPUT_SHARE = 2**-11  # relative error of a rounding to FP16
_FUNCTION_SHARE = 2**-22  # of an exponential, a quotient or a root in FP32 on a GPU
_UPDATE_FUNCTIONS = 4  # behind what a row adds to the state: both activations, the norm and beta


def gated_delta_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """One launch; floor: the state read once and written after every row, projections in, outputs out."""
    floor, memory = delta_bytes(cell.shape), delta_memory(cell.shape)
    count, cold = choose_copies(machine, floor, memory, config.max_copies)
    copies = delta_copies(cell.shape, machine.device, config.seed, count)
    launches: list[Callable[[], object]] = [
        functools.partial(gated_delta_triton, **vars(inputs)) for inputs in copies
    ]
    checked = sample_groups(cell.shape.requests, config.check_groups, config.seed)
    check = functools.partial(check_delta, copies[-1], checked, launches[-1])
    detail = settings(default_delta_config(*copies[-1].state.shape[-2:]))
    return Case(floor, [Contender("triton", launches, check, detail)], count, cold)


def check_delta(inputs: DeltaStepInputs, requests: list[int], launch: Callable[[], object]) -> Check:
    """Run the inputs' launch, and compare outputs, states and the ring of some requests with float64.

    Permitted are the largest error that the same computation has in eager FP32, and more: for outputs a
    rounding to FP16, for states the approximate functions of a GPU behind the last update and behind every
    row's decay, relative to the number and to the root mean square of its row. The rows' inputs must be in
    the ring bit for bit.
    """
    before = {request: _caches_of(inputs, request) for request in requests}
    inputs.out.fill_(torch.nan)
    launch()
    rows, error = inputs.rows.longest, 0.0
    functions = _UPDATE_FUNCTIONS + torch.arange(1, rows + 1, device=inputs.state.device)
    shares: tuple[float | Tensor, ...] = (_OUTPUT_SHARE, _FUNCTION_SHARE * functions.view(-1, 1, 1, 1))
    for request, caches in before.items():
        own = slice(request * rows, (request + 1) * rows)
        places = inputs.rows.positions[own] % inputs.ring.shape[1]
        if not torch.equal(inputs.ring[request, places], inputs.inputs.mixed[own]):
            error = float("inf")
        parts = DeltaInputs(**{name: x[own] for name, x in vars(inputs.inputs).items()})
        expected, eager = (
            exact_request(parts, inputs.weights, *caches, inputs.eps, dtype)
            for dtype in (torch.float64, torch.float32)
        )
        actual = (inputs.out[own], inputs.state[request, :rows])
        for got, exact, rough, share in zip(actual, expected, eager, shares, strict=True):
            spread = exact.flatten(1).square().mean(1).sqrt().view(-1, *(1,) * (exact.ndim - 1))
            bound = (rough.double() - exact).abs().max() + share * (exact.abs() + spread)
            error = max(error, worst(got, exact, bound))
    return Check(error, len(requests), len(inputs.rows.requests))


def _caches_of(inputs: DeltaStepInputs, request: int) -> tuple[Tensor, Tensor]:
    """A request's window of the convolution and its state, as the launch will read them."""
    taps = inputs.weights.conv.shape[1]
    first = inputs.rows.positions[request * inputs.rows.longest]
    positions = first - torch.arange(taps - 1, 0, -1, device=inputs.ring.device)
    window = inputs.ring[request, positions % inputs.ring.shape[1]]
    window[positions < 0] = 0  # before the text
    return window, inputs.state[request, inputs.rows.read_slots[request]].clone()
