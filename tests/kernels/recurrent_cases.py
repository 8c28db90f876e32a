"""Requests of a Gated DeltaNet layer for tests: their caches amid NaN, steps, and the references of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.experiments.gated_delta_exact import exact_request
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights, gated_delta_triton
from page4.kernels.recurrent_rows import RequestRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer."""

    keys: int = 1
    values: int = 2
    key_dim: int = 16
    value_dim: int = 32
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


def normal(generator: torch.Generator, *size: int) -> Tensor:
    """Random numbers that are the same on every device."""
    return torch.randn(size, generator=generator).to(DEVICE)


def weights_of(heads: Heads, seed: int = 0, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    """Weights as a model has them: strong and weak decay, some next to none."""
    generator = torch.Generator().manual_seed(seed)
    parts = (
        0.5 * normal(generator, heads.channels, heads.taps),
        normal(generator, heads.values),
        2 * normal(generator, heads.values) - 2,
        1 + 0.2 * normal(generator, heads.value_dim),
    )
    return DeltaWeights(*(x.to(dtype) for x in parts))


def inputs_of(
    heads: Heads, rows: int, seed: int, dtype: torch.dtype = torch.float32, pad: int = 0
) -> DeltaInputs:
    """Rows of a step; with ``pad`` they lie apart, with NaN between."""
    generator = torch.Generator().manual_seed(seed)

    def columns(width: int) -> Tensor:
        x = normal(generator, rows, width).to(dtype)
        return F.pad(x, (0, pad), value=torch.nan)[:, :width]

    return DeltaInputs(
        columns(heads.channels),
        columns(heads.values),
        columns(heads.values),
        columns(heads.values * heads.value_dim),
    )


def rows_slice(inputs: DeltaInputs, start: int, stop: int) -> DeltaInputs:
    """Some of the rows."""
    return DeltaInputs(*(None if x is None else x[start:stop] for x in vars(inputs).values()))


@dataclass
class Caches:
    """``ring [requests, capacity, C]`` and ``state [requests, slots, Hv, Dk, Dv]``."""

    ring: Tensor
    state: Tensor

    @classmethod
    def random(
        cls,
        heads: Heads,
        requests: int,
        slots: int,
        position: int = 7,
        dtype: torch.dtype = torch.float32,
        seed: int = 9,
    ) -> Caches:
        """Requests that stand at ``position`` with their state in slot 0; everything else is NaN."""
        generator = torch.Generator().manual_seed(seed)
        capacity = heads.taps - 1 + slots
        ring = torch.full((requests, capacity, heads.channels), torch.nan, dtype=dtype, device=DEVICE)
        state = torch.full(
            (requests, slots, heads.values, heads.key_dim, heads.value_dim), torch.nan, device=DEVICE
        )
        for back in range(1, heads.taps):
            if position >= back:
                ring[:, (position - back) % capacity] = normal(generator, requests, heads.channels).to(dtype)
        state[:, 0] = 0.3 * normal(generator, requests, *state.shape[2:]) if position else 0.0
        return cls(ring, state)

    def move_state(self, request: int, slot: int) -> None:
        """Takes the state of slot 0 to another one, as if so many drafts had been accepted."""
        if slot:
            self.state[request, slot] = self.state[request, 0]
            self.state[request, 0] = torch.nan

    def clone(self) -> Caches:
        return Caches(self.ring.clone(), self.state.clone())


def request_rows(
    requests: Sequence[int], read_slots: Sequence[int], positions: Sequence[int], rows: int | Sequence[int]
) -> RequestRows:
    """Rows of requests: equally many each, or a number for each, then packed apart."""

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=DEVICE)

    counts = [rows] * len(requests) if isinstance(rows, int) else list(rows)
    # Positions of all but the first row are not read.
    packed = [p if i == 0 else -99 for p, count in zip(positions, counts, strict=True) for i in range(count)]
    common = (ints(requests), ints(read_slots), ints(packed), max(counts, default=1))
    if isinstance(rows, int):
        return RequestRows(*common)
    first = [sum(counts[:i]) for i in range(len(counts))]
    return RequestRows(*common, first_row=ints(first), rows=ints(counts))


def reference(
    inputs: DeltaInputs, weights: DeltaWeights, caches: Caches, rows: RequestRows, every_row: bool
) -> Tensor:
    """What the launch computes, request after request with the references, in float64."""
    heads, _, value_dim = caches.state.shape[2:]
    channels, taps = weights.conv.shape
    capacity = caches.ring.shape[1]
    out = torch.full((inputs.mixed.shape[0], heads * value_dim), 7.0, dtype=torch.float64, device=DEVICE)
    row = 0
    for place, request in enumerate(rows.requests.tolist()):
        count = rows.longest if rows.rows is None else int(rows.rows[place])
        own, position = slice(row, row + count), int(rows.positions[row]) if count else 0
        row += count
        if request < 0 or count == 0:
            continue
        window = torch.zeros(taps - 1, channels, dtype=torch.float64, device=DEVICE)
        for back in range(1, min(taps - 1, position) + 1):
            window[taps - 1 - back] = caches.ring[request, (position - back) % capacity]
        mine, state = (
            rows_slice(inputs, own.start, own.stop),
            caches.state[request, int(rows.read_slots[place])],
        )
        out[own], states = exact_request(mine, weights, window, state, EPS)
        kept = states if every_row else states[-1:]
        caches.state[request, : len(kept)] = kept.to(caches.state.dtype)
        for t in range(max(0, count - capacity), count):
            caches.ring[request, (position + t) % capacity] = inputs.mixed[own.start + t]
    return out


def run(
    inputs: DeltaInputs, weights: DeltaWeights, caches: Caches, rows: RequestRows, every_row: bool
) -> Tensor:
    """The launch, into memory that holds 7 before."""
    dtype = torch.float32 if inputs.z is None else inputs.z.dtype
    shape = (inputs.mixed.shape[0], caches.state.shape[2] * caches.state.shape[4])
    out = torch.full(shape, 7.0, dtype=dtype, device=DEVICE)
    gated_delta_triton(inputs, weights, caches.ring, caches.state, rows, every_row, EPS, out)
    return out


def without_gate(inputs: DeltaInputs) -> DeltaInputs:
    return replace(inputs, z=None)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal NaNs, and values within the rounding of the dtype they were computed to."""
    tolerance = 1e-3 if dtype == torch.float16 else 2e-5
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def assert_same_caches(actual: Caches, expected: Caches) -> None:
    assert_close(actual.state, expected.state)
    assert torch.equal(actual.ring.nan_to_num(9.0), expected.ring.nan_to_num(9.0))
