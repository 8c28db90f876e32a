"""Calls of the launchers of recurrent layers, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from page4.kernels.causal_conv_triton import causal_conv_triton
from page4.kernels.gated_delta_dispatch import prefill_gated_delta
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights, gated_delta_triton, norms_in_kernel
from page4.kernels.recurrent_rows import RequestRows

REQUESTS = 64
ROWS = 4  # verification of three drafts
CHUNK = 512  # rows of a prompt
TAPS = 4
PLE_CHANNELS, PLE_DILATION = 4 * 2560, 3  # of the public model


@dataclass(frozen=True)
class Heads:
    """Sizes of a Gated DeltaNet layer."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"{self.values}/{self.keys} heads of {self.key_dim}x{self.value_dim}"


# The public model's layer, the shipped one's, and the largest that normalise in the kernel and do not.
HEADS = (Heads(16, 48, 128, 128), Heads(4, 8, 64, 64), Heads(4, 8, 128, 256), Heads(4, 8, 256, 256))


def recurrent_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each call with what it does in words: FP16 rows, decode steps and chunks of prompts."""
    for heads in HEADS:
        yield f"{heads}, {ROWS} rows x{REQUESTS}", partial(_mix, heads, ROWS, every_row=True)
        yield f"{heads}, chunk of {CHUNK}", partial(_mix, heads, CHUNK, every_row=False)
        if heads.key_dim == heads.value_dim:  # the other's kernels differ by a number
            yield f"{heads}, prompt of {CHUNK}", partial(_prefill, heads)
    yield f"{PLE_CHANNELS} channels, {ROWS} rows x{REQUESTS}", partial(_convolve, ROWS)
    yield f"{PLE_CHANNELS} channels, chunk of {CHUNK}", partial(_convolve, CHUNK)


def _mix(heads: Heads, rows: int, every_row: bool) -> None:
    gated_delta_triton(**_inputs(heads, REQUESTS if every_row else 1, rows), every_row=every_row)


def _prefill(heads: Heads) -> None:
    prefill_gated_delta(**_inputs(heads, 1, CHUNK))


def _inputs(heads: Heads, batch: int, rows: int) -> dict[str, Any]:
    """Arguments of a call, by the launchers' names."""
    width = heads.values * heads.value_dim
    channels = 2 * heads.keys * heads.key_dim + width
    inputs = DeltaInputs(
        mixed=_half(batch * rows, channels),
        a=_half(batch * rows, heads.values),
        b=_half(batch * rows, heads.values),
        z=_half(batch * rows, width) if norms_in_kernel(heads.key_dim, heads.value_dim) else None,
    )
    weights = DeltaWeights(
        _half(channels, TAPS), _half(heads.values), _half(heads.values), _half(heads.value_dim)
    )
    ring = _half(batch, TAPS - 1 + ROWS, channels)
    state = torch.empty(batch, ROWS, heads.values, heads.key_dim, heads.value_dim)
    return {"inputs": inputs, "weights": weights, "ring": ring, "state": state, "rows": _rows(batch, rows)}


def _convolve(rows: int) -> None:
    batch = REQUESTS if rows == ROWS else 1
    x = torch.empty(batch * rows, PLE_CHANNELS)
    ring = torch.empty(batch, (TAPS - 1) * PLE_DILATION + ROWS, PLE_CHANNELS)
    causal_conv_triton(x, _half(PLE_CHANNELS, TAPS), ring, _rows(batch, rows), PLE_DILATION)


def _rows(batch: int, rows: int) -> RequestRows:
    requests = torch.empty(batch, dtype=torch.int64)
    return RequestRows(requests, requests, torch.empty(batch * rows, dtype=torch.int64), rows)


def _half(*size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float16)
