"""The launches of a mixture of experts against float64 and PyTorch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kernels.moe_triton import combine_triton, route_triton, swiglu_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(DEVICE, dtype)


def check(actual: Tensor, exact: Tensor, roundings: int = 2) -> None:
    """FP32 inside and rounded once."""
    bound = torch.finfo(actual.dtype).eps * exact.abs() + 2e-6 * exact.abs().max()
    assert bool(((actual.double() - exact).abs() <= roundings * bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"), [(1, 8, 2), (5, 6, 6), (4, 512, 10), (3, 1, 1), (9, 33, 3)]
)
@pytest.mark.parametrize("renormalise", [True, False])
def test_the_most_probable_experts(
    rows: int, experts: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    logits = random(rows, experts + 1, seed=experts, dtype=dtype, scale=3)[:, :experts]
    weights, chosen = route_triton(logits, top_k, renormalise)
    probabilities = torch.softmax(logits.double(), dim=-1)
    order = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(chosen, order), "ties go to the lower index"
    expected = probabilities.gather(1, order)
    if renormalise:
        expected = expected / expected.sum(-1, keepdim=True)
    assert (weights.double() - expected).abs().max() <= 2e-6


def test_ties_go_to_the_lower_expert() -> None:
    logits = torch.zeros(2, 8, device=DEVICE)
    logits[1, 5] = 1
    assert route_triton(logits, 3, True)[1].tolist() == [[0, 1, 2], [5, 0, 1]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_experts_exist_whatever_a_row_holds(bad: float) -> None:
    """Rows of padded requests hold anything, and are computed like all others."""
    logits = torch.full((2, 6), bad, device=DEVICE)
    logits[1] = torch.arange(6.0)
    weights, chosen = route_triton(logits, 2, True)
    assert bool(((chosen >= 0) & (chosen < 6)).all())
    assert chosen[1].tolist() == [5, 4] and bool(weights[1].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (7, 1), (4, 640), (33, 24)])
def test_the_activation(rows: int, width: int, dtype: torch.dtype) -> None:
    gate, up = random(rows, 2 * width, seed=width, dtype=dtype, scale=4).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    check(swiglu_triton(gate, up), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_expert", [True, False])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "width"), [(4, 8, 2, 384), (1, 3, 3, 5), (6, 16, 10, 700)]
)
def test_the_weighted_sum(
    rows: int, experts: int, top_k: int, width: int, by_expert: bool, dtype: torch.dtype
) -> None:
    """Experts that a row did not choose may have produced anything."""
    weights, chosen = route_triton(random(rows, experts, seed=1), top_k, True)
    each = random(experts, rows, width, seed=2, dtype=dtype)
    shared, gate = random(rows, width, seed=3, dtype=dtype), random(rows, 1, seed=4, dtype=dtype)
    own = each[chosen, torch.arange(rows, device=DEVICE)[:, None]]  # [N, k, H]
    exact = (own.double() * weights.double().unsqueeze(-1)).sum(1)
    exact += torch.sigmoid(gate.double()) * shared.double()
    unchosen = torch.ones(experts, rows, dtype=torch.bool, device=DEVICE)
    unchosen[chosen, torch.arange(rows, device=DEVICE)[:, None]] = False
    each[unchosen] = torch.nan
    outputs = each if by_expert else own.flatten(0, 1).contiguous()
    check(combine_triton(outputs, weights, chosen, shared, gate, by_expert), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_launch(dtype: torch.dtype) -> None:
    """One test of all, which other toolchains run too."""
    test_the_most_probable_experts(5, 33, 3, True, dtype)
    test_the_activation(4, 96, dtype)
    test_the_weighted_sum(4, 8, 2, 96, True, dtype)
    test_the_weighted_sum(4, 8, 2, 96, False, dtype)


def test_shapes_that_disagree_are_refused() -> None:
    x, k = torch.ones(2, 8, device=DEVICE), torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    w, g = torch.ones(2, 3, device=DEVICE), torch.ones(2, 1, device=DEVICE)
    for call in (
        lambda: route_triton(x, 9, True),
        lambda: route_triton(x, 0, True),
        lambda: route_triton(x.t(), 1, True),
        lambda: swiglu_triton(x, x[:1]),
        lambda: swiglu_triton(x, x.half()),
        lambda: swiglu_triton(x.t(), x.t()),
        lambda: combine_triton(torch.ones(5, 8, device=DEVICE), w, k, x, g, False),
        lambda: combine_triton(torch.ones(6, 8, device=DEVICE), w, k, x, g, True),
        lambda: combine_triton(torch.ones(6, 8, device=DEVICE), w, k[:1], x, g, False),
        lambda: combine_triton(torch.ones(6, 8, device=DEVICE), w, k, x, w, False),
    ):
        with pytest.raises(InputError):
            call()
