"""A Gated DeltaNet layer's decode step as a case of the bench, checked against float64."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.experiments.bench.case import Case, Contender
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check, sample_groups
from page4.experiments.gated_delta_cases import DeltaStepInputs, delta_bytes, delta_copies
from page4.experiments.kernel_cases import StepShape
from page4.kernels.gated_delta import causal_conv1d_reference, recurrent_gated_delta_reference
from page4.kernels.gated_delta_triton import gated_delta_triton

_EPS = 1e-6  # of the launcher's norm


def delta_case(shape: StepShape, check_groups: int, seed: int, machine: Machine) -> Case:
    """The launch of one layer; floor: the state once, and once for every row, and what goes in and out."""
    floor = delta_bytes(shape)
    count, cold = choose_copies(machine, floor, 2 * floor, 1)
    copies = delta_copies(shape, machine.device, seed, count)
    launches = [functools.partial(gated_delta_triton, **vars(inputs)) for inputs in copies]
    checked = sample_groups(shape.requests, check_groups, seed)
    check = functools.partial(check_delta, copies[-1], checked)
    return Case(floor, [Contender("triton", launches, check)], count, cold)


def check_delta(inputs: DeltaStepInputs, checked: list[int]) -> Check:
    """Run the inputs' launch and compare output and states of the chosen requests with float64.

    Permitted is the error of the same computation in FP32, and half a place of the largest value: in FP16 for
    the output, in FP32 times eight, for sums in another order, for states.
    """
    exact = [reference(inputs, request, torch.float64) for request in checked]
    eager = [reference(inputs, request, torch.float32) for request in checked]
    inputs.out.fill_(torch.nan)
    gated_delta_triton(**vars(inputs))
    rows, error = inputs.rows.longest, 0.0
    for request, (out, states), (eager_out, eager_states) in zip(checked, exact, eager, strict=True):
        own = slice(request * rows, (request + 1) * rows)
        error = max(
            error,
            _share(inputs.out[own], out, eager_out.to(inputs.out.dtype), 2.0**-12),
            _share(inputs.state[request, :rows], states, eager_states, 2.0**-22),
        )
    return Check(error, len(checked), len(inputs.rows.requests))


def reference(inputs: DeltaStepInputs, request: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output ``[rows, Hv Dv]`` of a request and its states after every row ``[rows, Hv, Dk, Dv]``."""
    rows, values, weights = inputs.rows.longest, inputs.inputs, inputs.weights
    own = slice(request * rows, (request + 1) * rows)
    position, capacity = int(inputs.rows.positions[request * rows]), inputs.ring.shape[1]
    heads, key_dim, value_dim = inputs.state.shape[2:]
    taps, width = weights.conv.shape[1], heads * value_dim
    keys = (inputs.ring.shape[2] - width) // 2
    places = torch.arange(position - taps + 1, position, device=inputs.ring.device) % capacity
    window = inputs.ring[request, places][None].to(dtype)
    mixed, _ = causal_conv1d_reference(values.mixed[None, own].to(dtype), weights.conv.to(dtype), window)
    q, k, v = F.silu(mixed).split((keys, keys, width), -1)
    steps = F.softplus(values.a[own].to(dtype) + weights.dt_bias.to(dtype))
    out, states = recurrent_gated_delta_reference(
        q.unflatten(-1, (-1, key_dim)),
        k.unflatten(-1, (-1, key_dim)),
        v.unflatten(-1, (heads, value_dim)),
        (-weights.a_log.to(dtype).exp() * steps)[None],
        values.b[None, own].to(dtype).sigmoid(),
        inputs.state[request, int(inputs.rows.read_slots[request])][None].to(dtype),
    )
    assert values.z is not None
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + _EPS) * weights.norm.to(dtype)
    gate = values.z[None, own].to(dtype).sigmoid().unflatten(-1, (heads, value_dim))
    return (out * gate).flatten(-2)[0], states[0]


def _share(got: Tensor, exact: Tensor, eager: Tensor, place: float) -> float:
    """Largest error over what is permitted; infinite for NaN."""
    permitted = (eager.double() - exact).abs().max() + place * exact.abs().max()
    share = float((got.double() - exact).abs().max() / permitted)
    return share if share == share else float("inf")
