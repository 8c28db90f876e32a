"""Recurrent layers at the sizes of real models on a GPU: against float64, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from page4.kernels.causal_conv_triton import causal_conv_triton
from page4.kernels.gated_delta_triton import gated_delta_triton
from page4.kernels.recurrent_rows import RequestRows

from .recurrent_cases import (
    Caches,
    Heads,
    assert_close,
    assert_same_caches,
    inputs_of,
    reference,
    request_rows,
    rows_slice,
    run,
    weights_of,
)
from .test_gated_delta_chunk_triton import assert_near, chunked
from .test_graph_capture import capture, same_bits, without_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PUBLIC = Heads(keys=16, values=48, key_dim=128, value_dim=128)
SHIPPED = Heads(keys=4, values=8, key_dim=64, value_dim=64)
LANES, ROWS = 4, 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [PUBLIC, SHIPPED], ids=["public", "shipped"])
@pytest.mark.parametrize(("requests", "rows", "every_row"), [(1, 4, True), (24, 4, True), (3, 700, False)])
def test_real_sizes(heads: Heads, requests: int, rows: int, every_row: bool, dtype: torch.dtype) -> None:
    caches = Caches.random(heads, requests + 1, ROWS, dtype=dtype)
    for request in range(requests):
        caches.move_state(request, request % ROWS)
    chosen = [*range(requests), -1]
    slots = [request % ROWS for request in chosen]
    lists = request_rows(chosen, slots, [7] * len(chosen), rows)
    inputs = inputs_of(heads, len(chosen) * rows, 3, dtype, pad=8)
    weights, expected_caches = weights_of(heads, dtype=dtype), caches.clone()
    expected = reference(inputs, weights, expected_caches, lists, every_row)
    assert_close(run(inputs, weights, caches, lists, every_row), expected, dtype)
    assert_same_caches(caches, expected_caches)


@pytest.mark.parametrize("heads", [PUBLIC, SHIPPED], ids=["public", "shipped"])
def test_bits_depend_neither_on_the_batch_nor_on_the_other_rows(heads: Heads) -> None:
    half, requests = torch.float16, 64
    caches = Caches.random(heads, requests, ROWS, dtype=half)
    inputs, weights = inputs_of(heads, requests * ROWS, 5, half), weights_of(heads, dtype=half)
    single = Caches(caches.ring[17:18].clone(), caches.state[17:18].clone())
    lists = request_rows(range(requests), [0] * requests, [7] * requests, ROWS)
    out = run(inputs, weights, caches, lists, every_row=True)
    for t in range(ROWS):
        row = 17 * ROWS + t
        step = rows_slice(inputs, row, row + 1)
        own = run(step, weights, single, request_rows([0], [0], [7 + t], 1), every_row=True)
        assert same_bits(own[0], out[row])
        assert same_bits(single.state[0, 0], caches.state[17, t])
    assert same_bits(single.ring[0], caches.ring[17])


tensor_cores = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
    reason="prompts are scanned below compute capability 8.0",
)


@tensor_cores
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [PUBLIC, SHIPPED], ids=["public", "shipped"])
def test_chunks_of_real_sizes(heads: Heads, dtype: torch.dtype) -> None:
    """Prompts of unequal length from several slots: outputs, states and rings as float64 has them."""
    counts = [700, 0, 64, 5, 333]
    caches = Caches.random(heads, 6, ROWS, dtype=dtype)
    for request in range(4):
        caches.move_state(request, request)
    lists = request_rows([0, 5, 1, -1, 3], [0, 0, 1, 0, 3], [7] * 5, counts)
    inputs, weights = inputs_of(heads, sum(counts), 3, dtype, pad=8), weights_of(heads, dtype=dtype)
    expected_caches = caches.clone()
    expected = reference(inputs, weights, expected_caches, lists, every_row=False)
    out = chunked(inputs, weights, caches, lists)
    if dtype == torch.float16:
        assert_close(out, expected, dtype)
    else:
        assert_near(out, expected)
    assert_near(caches.state, expected_caches.state)
    assert same_bits(caches.ring.nan_to_num(9.0), expected_caches.ring.nan_to_num(9.0))


@tensor_cores
@pytest.mark.parametrize("heads", [PUBLIC, SHIPPED], ids=["public", "shipped"])
def test_pieces_of_a_prompt_and_repetitions_leave_the_same_bits(heads: Heads) -> None:
    """Twice at once, beside another request, and in pieces of whole chunks; none waits for the host."""
    half, rows = torch.float16, 1000
    inputs, weights = inputs_of(heads, 2 * rows, 5, half), weights_of(heads, dtype=half)
    first = Caches.random(heads, 2, ROWS, position=0, dtype=half)
    together, again, alone, pieces = (first.clone() for _ in range(4))
    both = request_rows([1, 0], [0, 0], [0, 0], rows)
    out = chunked(inputs, weights, together, both)
    with without_waiting():
        repeated = chunked(inputs, weights, again, both)
    assert same_bits(out, repeated) and same_bits(together.state[:, 0], again.state[:, 0])
    own = rows_slice(inputs, 0, rows)
    assert same_bits(chunked(own, weights, alone, request_rows([1], [0], [0], rows)), out[:rows])
    parts, start = [], 0
    for count in (512, 64, 424):
        piece = rows_slice(own, start, start + count)
        parts.append(chunked(piece, weights, pieces, request_rows([1], [0], [start], count)))
        start += count
    assert same_bits(torch.cat(parts), out[:rows])
    for caches in (alone, pieces):
        assert same_bits(caches.state[1, 0], together.state[1, 0])


def replayed(
    launch: Callable[[RequestRows], None],
    lists: RequestRows,
    caches: Caches,
    out: Tensor,
    inputs: list[Tensor],
) -> None:
    """A captured launch on other inputs, positions, slots and padding does what it does eagerly."""
    launch(lists)  # compiles
    with without_waiting():
        launch(lists)
    graph = capture(lambda: launch(lists))
    for step, (requests, slots) in enumerate([([2, 0, 3, 1], [1, 3, 0, 2]), ([3, 1, -1, -1], [0, 2, 1, 0])]):
        new = request_rows(requests, slots, [11 + step] * LANES, ROWS)
        for name in ("requests", "read_slots", "positions"):
            getattr(lists, name).copy_(getattr(new, name))
        for x in inputs:
            x.copy_(torch.randn(x.shape, device=x.device))
        caches.state.normal_(std=0.2)
        caches.ring.normal_()
        before = caches.clone()
        out.fill_(7.0)
        launch(lists)
        eager, eager_out = caches.clone(), out.clone()
        caches.ring.copy_(before.ring)
        caches.state.copy_(before.state)
        out.fill_(7.0)
        graph.replay()
        assert same_bits(out, eager_out)
        assert same_bits(caches.ring, eager.ring) and same_bits(caches.state, eager.state)
        padded = torch.tensor([request < 0 for request in requests], device=out.device).repeat_interleave(
            ROWS
        )
        assert (out[padded] == 7).all() and out.isfinite().all()


def test_gated_delta_in_a_graph() -> None:
    half = torch.float16
    caches = Caches.random(PUBLIC, LANES, ROWS, dtype=half)
    inputs, weights = inputs_of(PUBLIC, LANES * ROWS, 3, half), weights_of(PUBLIC, dtype=half)
    assert inputs.z is not None
    out = torch.empty_like(inputs.z)

    def launch(lists: RequestRows) -> None:
        gated_delta_triton(inputs, weights, caches.ring, caches.state, lists, every_row=True, out=out)

    tensors = [inputs.mixed, inputs.a, inputs.b, inputs.z]
    replayed(launch, request_rows(range(LANES), [0] * LANES, [7] * LANES, ROWS), caches, out, tensors)


def test_convolution_in_a_graph() -> None:
    channels, dilation = 4 * 2560, 3
    caches = Caches(torch.randn(LANES, 9 + ROWS, channels, device="cuda"), torch.zeros(1, device="cuda"))
    x, weight = torch.randn(LANES * ROWS, channels, device="cuda"), torch.randn(channels, 4, device="cuda")
    out = torch.empty_like(x)

    def launch(lists: RequestRows) -> None:
        causal_conv_triton(x, weight, caches.ring, lists, dilation, out)

    replayed(launch, request_rows(range(LANES), [0] * LANES, [9] * LANES, ROWS), caches, out, [x])
