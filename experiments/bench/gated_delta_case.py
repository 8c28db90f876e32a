"""Cases of a linear layer: all between the projections of a Gated DeltaNet layer, of a step or of prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from page4.experiments.bench.case import Case, Contender, settings
from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import BenchConfig, Implementation
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check, sample_groups, worst
from page4.experiments.gated_delta_cases import (
    DeltaPromptInputs,
    DeltaStepInputs,
    delta_bytes,
    delta_copies,
    delta_memory,
    prompt_bytes,
    prompt_copies,
    prompt_memory,
)
from page4.experiments.gated_delta_exact import exact_prompt, exact_request
from page4.kernels.gated_delta_chunk_triton import default_chunk_config
from page4.kernels.gated_delta_dispatch import PrefillForm, choose_prefill_form, prefill_gated_delta
from page4.kernels.gated_delta_triton import (
    DeltaInputs,
    DeltaWeights,
    default_delta_config,
    gated_delta_triton,
)
from page4.kernels.page4_attention_dispatch import device_capability

_OUTPUT_SHARE = 2**-11  # relative error of a rounding to FP16
_FUNCTION_SHARE = 2**-22  # of an exponential, a quotient or a root in FP32 on a GPU
# A product of 128 terms: 16 steps of three products of TF32 parts, whose sums are truncated.
_PRODUCT_SHARE = 16 * 3 * 2**-23
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


def delta_forms(config: BenchConfig, device: torch.device) -> dict[Implementation, PrefillForm]:
    """The forms that are timed on prompts: what the model gets, and the scan, if that is another."""
    form, _ = choose_prefill_form("auto", device_capability(device))
    forms: dict[Implementation, PrefillForm] = {"triton": form, "scan": "scan"}
    if form == "scan":
        del forms["scan"]
    return {name: chosen for name, chosen in forms.items() if name in config.implementations}


def prefill_delta_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """Prompts; floor: the state read and written once, projections in, outputs out."""
    floor, memory = prompt_bytes(cell.shape), prompt_memory(cell.shape)
    count, cold = choose_copies(machine, floor, memory, config.max_copies)
    copies = prompt_copies(cell.shape, machine.device, config.seed, count)
    dims = copies[-1].state.shape[-2:]
    key_heads = key_heads_of(copies[-1])
    checked = sample_groups(cell.shape.requests * key_heads, config.check_groups, config.seed)
    contenders = []
    for name, form in delta_forms(config, machine.device).items():
        launches: list[Callable[[], object]] = [
            functools.partial(prefill_gated_delta, **vars(inputs), form=form) for inputs in copies
        ]
        detail = settings(default_chunk_config(*dims) if form == "chunk" else default_delta_config(*dims))
        check = functools.partial(check_prompt, copies[-1], checked, launches[-1])
        contenders.append(Contender(name, launches, check, f"{form}: {detail}", chosen=name == "triton"))
    return Case(floor, contenders, count, cold)


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
            error = max(error, worst(got, exact, _bound(exact, rough, share)))
    return Check(error, len(requests), len(inputs.rows.requests))


def check_prompt(inputs: DeltaPromptInputs, groups: list[int], launch: Callable[[], object]) -> Check:
    """Run the inputs' launch, and compare outputs, the state and the ring of some key heads with float64.

    A group is a key head of a request with the value heads that share it. Permitted are the largest error
    that the reference has in eager FP32, and of a product's factors what TF32 parts cost; for outputs a
    rounding to FP16 besides. The last rows' inputs must be in the ring bit for bit.
    """
    key_heads = key_heads_of(inputs)
    before = [(group, _caches_of(inputs, group // key_heads)) for group in groups]
    inputs.out.fill_(torch.nan)
    launch()
    rows, error = inputs.rows.longest, 0.0
    for group, caches in before:
        request, key_head = divmod(group, key_heads)
        own = slice(request * rows, (request + 1) * rows)
        kept = inputs.rows.positions[own][-inputs.ring.shape[1] :]
        if not torch.equal(
            inputs.ring[request, kept % inputs.ring.shape[1]], inputs.inputs.mixed[own][-len(kept) :]
        ):
            error = float("inf")
        parts = DeltaInputs(**{name: x[own] for name, x in vars(inputs.inputs).items()})
        arguments, values, columns = _heads_of(key_head, key_heads, parts, inputs.weights, *caches)
        expected, eager = (
            exact_prompt(*arguments, inputs.eps, dtype) for dtype in (torch.float64, torch.float32)
        )
        actual = (inputs.out[own, columns], inputs.state[request, 0, values])
        shares = (_OUTPUT_SHARE + _PRODUCT_SHARE, _PRODUCT_SHARE)
        for got, exact, rough, share in zip(actual, expected, eager, shares, strict=True):
            error = max(error, worst(got, exact, _bound(exact, rough, share)))
    return Check(error, len(groups), len(inputs.rows.requests) * key_heads)


def key_heads_of(inputs: DeltaPromptInputs) -> int:
    """Number of key heads."""
    heads, key_dim, value_dim = inputs.state.shape[2:]
    return (inputs.inputs.mixed.shape[1] - heads * value_dim) // (2 * key_dim)


def _heads_of(
    key_head: int, key_heads: int, inputs: DeltaInputs, weights: DeltaWeights, window: Tensor, state: Tensor
) -> tuple[tuple[DeltaInputs, DeltaWeights, Tensor, Tensor], slice, slice]:
    """What a key head and its value heads compute from, the value heads, and their columns of the output."""
    heads, key_dim, value_dim = state.shape
    group = heads // key_heads
    values = slice(key_head * group, (key_head + 1) * group)
    columns = slice(values.start * value_dim, values.stop * value_dim)
    key = torch.arange(key_head * key_dim, (key_head + 1) * key_dim)
    value = torch.arange(columns.start, columns.stop) + 2 * key_heads * key_dim
    channels = torch.cat((key, key + key_heads * key_dim, value)).to(state.device)
    part = DeltaInputs(
        inputs.mixed[:, channels],
        inputs.a[:, values],
        inputs.b[:, values],
        None if inputs.z is None else inputs.z[:, columns],
    )
    own = DeltaWeights(weights.conv[channels], weights.a_log[values], weights.dt_bias[values], weights.norm)
    return (part, own, window[:, channels], state[values]), values, columns


def _bound(exact: Tensor, rough: Tensor, share: float | Tensor) -> Tensor:
    """The largest error of eager FP32, and a share of the number and of the root mean square of its row."""
    spread = exact.flatten(1).square().mean(1).sqrt().view(-1, *(1,) * (exact.ndim - 1))
    return (rough.double() - exact).abs().max() + share * (exact.abs() + spread)


def _caches_of(inputs: DeltaPromptInputs, request: int) -> tuple[Tensor, Tensor]:
    """A request's window of the convolution and its state, as the launch will read them."""
    taps = inputs.weights.conv.shape[1]
    first = inputs.rows.positions[request * inputs.rows.longest]
    positions = first - torch.arange(taps - 1, 0, -1, device=inputs.ring.device)
    window = inputs.ring[request, positions % inputs.ring.shape[1]]
    window[positions < 0] = 0  # before the text
    return window, inputs.state[request, inputs.rows.read_slots[request]].clone()
