"""Counts of magnitudes agree with the values themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kvcache.magnitudes import MAGNITUDES, Magnitudes


def values(seed: int, tokens: int = 37) -> Tensor:
    """Skewed FP16 values ``[T, 3, 8]``, subnormal ones, zeros of both signs and the largest among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, 8, generator=generator).exp() * torch.randn(tokens, 3, 8, generator=generator)
    x[0, 0, :4] = torch.tensor([0.0, -0.0, 2.0**-24, -65504.0])
    return x.half()


def test_magnitudes_are_every_finite_one_of_fp16_in_order() -> None:
    assert MAGNITUDES[0] == 0 and MAGNITUDES[-1] == torch.finfo(torch.float16).max
    assert (np.diff(MAGNITUDES) > 0).all()


def test_counts_are_those_of_the_values_by_head() -> None:
    x = values(1)
    observed = Magnitudes.of(x)
    for head, counted in enumerate(observed.heads):
        expected, counts = np.unique(x[:, head].abs().double().numpy(), return_counts=True)
        found, found_counts = counted.occurring()
        assert (found == expected).all() and (found_counts == counts).all()
    assert observed.total == x.numel()
    assert observed.maximum == 65504 and observed.heads[1].maximum == float(x[:, 1].abs().max())


def test_a_view_with_strides_counts_as_its_values_do() -> None:
    """A layer's pages are ``[pages, Hkv, 16, D]``, so what is read of them is no plain tensor."""
    x = values(2)
    strided = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not strided.is_contiguous()
    assert (Magnitudes.of(strided).counts == Magnitudes.of(x).counts).all()


@pytest.mark.parametrize("percent", [0.001, 1, 50, 99.9, 99.99, 100])
def test_a_percentile_is_the_nearest_rank(percent: float) -> None:
    x = values(3)
    ordered = np.sort(x.abs().double().numpy().flatten())
    rank = max(math.ceil(percent / 100 * len(ordered)), 1)
    assert Magnitudes.of(x).percentile(percent) == ordered[rank - 1]


def test_parts_sum_to_the_whole() -> None:
    x = values(4)
    parts = Magnitudes.of(x[:11]) + Magnitudes.of(x[11:])
    assert (parts.counts == Magnitudes.of(x).counts).all()
    assert parts.maximum == max(Magnitudes.of(x[:11]).maximum, Magnitudes.of(x[11:]).maximum)


def test_shares_and_octaves() -> None:
    observed = Magnitudes.of(torch.tensor([0.0, 0.5, -0.75, 1.0, 6.0, -8.0]).half()[:, None, None])
    assert observed.share_above(1.0) == 2 / 6 and observed.share_above(8.0) == 0
    assert observed.by_log2(1) == [(-1.0, 2), (0.0, 1), (1.0, 0), (2.0, 1), (3.0, 1)]
    assert sum(count for _, count in observed.by_log2()) == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e6])
def test_values_that_are_not_finite_in_fp16_are_refused(bad: float) -> None:
    x = values(5)
    x[3, 1, 2] = bad
    with pytest.raises(InputError, match="K of layer 3 hold NaN, infinity or more than FP16 can"):
        Magnitudes.of(x, "K of layer 3")


def test_nothing_has_no_maximum() -> None:
    nothing = Magnitudes.of(torch.empty(0, 2, 8, dtype=torch.float16))
    assert nothing.maximum == nothing.percentile(99) == nothing.share_above(0) == 0 == nothing.total
    assert nothing.by_log2() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_counts_as_a_cpu_does() -> None:
    x = values(6, tokens=5000)
    assert (Magnitudes.of(x.cuda()).counts == Magnitudes.of(x).counts).all()
