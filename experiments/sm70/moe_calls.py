"""Calls of the launchers of a mixture of experts, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from page4.kernels.moe_triton import combine_triton, route_triton, swiglu_triton

ROWS = 8


@dataclass(frozen=True)
class Sizes:
    """Of a layer."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


# The public model's layer, and the shipped one's.
SIZES = (Sizes(512, 10, 2560, 640), Sizes(8, 2, 384, 64))


def moe_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each call with what it does in words: FP16 rows of a decode step."""
    for sizes in SIZES:
        yield f"{sizes.top_k} of {sizes.experts} experts, hidden {sizes.hidden}", partial(_layer, sizes)


def _layer(sizes: Sizes) -> None:
    weights, chosen = route_triton(_half(ROWS, sizes.experts), sizes.top_k, True)
    swiglu_triton(*_half(ROWS, 2 * sizes.intermediate).chunk(2, dim=1))
    shared, gate = _half(ROWS, sizes.hidden), _half(ROWS, 1)
    by_expert = ROWS * sizes.top_k >= sizes.experts
    shape = (sizes.experts, ROWS) if by_expert else (ROWS * sizes.top_k,)
    combine_triton(_half(*shape, sizes.hidden), weights, chosen, shared, gate, by_expert)


def _half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16)
