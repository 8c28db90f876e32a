"""Calls of the launchers of hyper-connections, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from page4.kernels.hyper_connection_triton import (
    activate_triton,
    group_norm_triton,
    mix_streams_triton,
    write_streams_triton,
)

ROWS, STREAMS = 64 * 4, 4
SIZES = ((2560, 320), (384, 27))  # hidden size and rank: of the public model, and of the shipped one


def hyper_connection_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each call with what it does in words: FP16 rows of a decode step."""
    widest = STREAMS * SIZES[0][0]
    yield f"one stream of {widest}", partial(_norm, widest)
    for hidden, rank in SIZES:
        yield f"{STREAMS} streams of {hidden}", partial(_read_and_write, hidden, rank)


def _read_and_write(hidden: int, rank: int) -> None:
    streams, weight = _half(ROWS, STREAMS * hidden), _half(STREAMS * hidden)
    inject = _half(ROWS, STREAMS)
    normed = group_norm_triton(streams, weight, STREAMS)
    activate_triton(_half(ROWS, rank), inject, STREAMS)
    write_streams_triton(streams, mix_streams_triton(streams, normed, STREAMS), inject)


def _norm(width: int) -> None:
    group_norm_triton(_half(ROWS, width), _half(width), 1)


def _half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16)
