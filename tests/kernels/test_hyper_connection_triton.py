"""The launches of a hyper-connection against float64; none may lose more than single operations do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kernels.hyper_connection_triton import (
    activate_triton,
    group_norm_triton,
    mix_streams_triton,
    write_streams_triton,
)
from page4.kernels.norm_rope import rms_norm_zero_centred

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16)
SHAPES = [(1, 4, 384), (5, 4, 48), (3, 1, 1536), (7, 2, 5), (2, 3, 1), (4, 4, 2560)]


def random(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(DEVICE, dtype)


def check(actual: Tensor, eager: Tensor, exact: Tensor) -> None:
    """At most the error of the same computation in single operations, and one rounding of the result."""
    assert actual.dtype == eager.dtype and actual.shape == eager.shape
    error, permitted = (actual.double() - exact).abs(), (eager.double() - exact).abs().max()
    assert bool((error <= permitted + torch.finfo(actual.dtype).eps * exact.abs()).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "streams", "width"), SHAPES)
def test_the_norm_of_every_stream(rows: int, streams: int, width: int, dtype: torch.dtype) -> None:
    wide = random(rows, streams * width + 3, seed=1, dtype=dtype, scale=3)
    x, weight = wide[:, : streams * width], random(streams * width, seed=2, dtype=dtype, scale=0.3)
    eager = rms_norm_zero_centred(x, weight, 1e-6, width)
    exact = rms_norm_zero_centred(x.double(), weight.double(), 1e-6, width)
    check(group_norm_triton(x, weight, streams), eager, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "rank", "streams"), [(1, 27, 4), (9, 320, 4), (33, 12, 2), (2, 1, 1)])
@pytest.mark.parametrize("injects", [True, False])
def test_activations(rows: int, rank: int, streams: int, injects: bool, dtype: torch.dtype) -> None:
    low = random(rows, rank, seed=3, dtype=dtype, scale=6)
    inject = random(rows, streams, seed=4, dtype=dtype, scale=6) if injects else None
    kept = low.clone(), None if inject is None else inject.clone()
    activate_triton(low, inject, streams)
    silu, sigmoid = torch.nn.functional.silu, torch.sigmoid
    check(low, silu(kept[0] / streams), silu(kept[0].double() / streams))
    if inject is not None and kept[1] is not None:
        check(inject, 2 * sigmoid(kept[1] / streams), 2 * sigmoid(kept[1].double() / streams))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "streams", "width"), SHAPES)
def test_the_mix_of_the_streams(rows: int, streams: int, width: int, dtype: torch.dtype) -> None:
    gate, normed = (random(rows, streams * width, seed=s, dtype=dtype, scale=2) for s in (5, 6))

    def mix(gate: Tensor, normed: Tensor) -> Tensor:
        return (torch.sigmoid(gate) * normed).unflatten(-1, (streams, width)).mean(-2)

    check(mix_streams_triton(gate, normed, streams), mix(gate, normed), mix(gate.double(), normed.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "streams", "width"), SHAPES)
def test_the_write_to_the_streams(rows: int, streams: int, width: int, dtype: torch.dtype) -> None:
    residual = random(rows, streams * width + 1, seed=7, dtype=dtype)[:, : streams * width]
    output = random(rows, width + 2, seed=8, dtype=dtype)[:, :width]
    inject = random(rows, streams, seed=9, dtype=dtype)

    def write(residual: Tensor, output: Tensor, inject: Tensor) -> Tensor:
        return residual + (inject.unsqueeze(-1) * output.unsqueeze(-2)).flatten(-2)

    actual = write_streams_triton(residual, output, inject)
    eager = write(residual, output, inject)
    check(actual, eager, write(residual.double(), output.double(), inject.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:1])
def test_every_launch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """One test of all four, which other toolchains run too."""
    test_the_norm_of_every_stream(*shape, dtype)
    test_activations(shape[0], 27, shape[1], True, dtype)
    test_the_mix_of_the_streams(*shape, dtype)
    test_the_write_to_the_streams(*shape, dtype)


def test_a_row_depends_on_itself_alone() -> None:
    """Bit for bit, whatever is beside it, NaN included."""
    x, weight = random(6, 192, seed=1, dtype=torch.float32), random(192, seed=2, dtype=torch.float32)
    gate, inject = random(6, 192, seed=3, dtype=torch.float32), random(6, 4, seed=4, dtype=torch.float32)

    def everything(rows: slice) -> list[Tensor]:
        normed = group_norm_triton(x[rows], weight, 4)
        mixed = mix_streams_triton(gate[rows].contiguous(), normed, 4)
        return [normed, mixed, write_streams_triton(x[rows], mixed, inject[rows].contiguous())]

    alone = everything(slice(2, 3))
    x[3], gate[1] = torch.nan, torch.nan
    for together, one in zip(everything(slice(0, 6)), alone, strict=True):
        assert torch.equal(together[2:3], one)


def test_no_rows_are_no_launch() -> None:
    x = torch.empty(0, 8, device=DEVICE)
    assert group_norm_triton(x, torch.ones(8, device=DEVICE), 2).shape == (0, 8)
    activate_triton(x, x[:, :2].contiguous(), 2)
    assert mix_streams_triton(x, x, 2).shape == (0, 4)
    assert write_streams_triton(x, x[:, :4], torch.empty(0, 2, device=DEVICE)).shape == (0, 8)


def test_shapes_that_disagree_are_refused() -> None:
    x = torch.ones(2, 8, device=DEVICE)
    for call in (
        lambda: group_norm_triton(x, torch.ones(7, device=DEVICE), 2),
        lambda: group_norm_triton(x, torch.ones(8, device=DEVICE), 3),
        lambda: group_norm_triton(x.t(), torch.ones(2, device=DEVICE), 1),
        lambda: activate_triton(x.t(), None, 2),
        lambda: mix_streams_triton(x, x[:1], 2),
        lambda: mix_streams_triton(x, x.half(), 2),
        lambda: mix_streams_triton(x, x, 3),
        lambda: write_streams_triton(x, x, torch.ones(2, 2, device=DEVICE)),
        lambda: write_streams_triton(x, x[:1, :4], torch.ones(2, 2, device=DEVICE)),
    ):
        with pytest.raises(InputError):
            call()
