"""The gated delta rule over chunks of a prompt: against the references in float64, and in pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton.ir import INPUT_PRECISION
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from page4.kernels import gated_delta_chunk_triton as module
from page4.kernels.errors import InputError
from page4.kernels.gated_delta_chunk_triton import (
    CHUNK,
    ChunkConfig,
    chunk_gated_delta_triton,
    unit_lower_inverse,
)
from page4.kernels.gated_delta_dispatch import choose_prefill_form, prefill_gated_delta
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights
from page4.kernels.recurrent_rows import RequestRows

from .recurrent_cases import (
    DEVICE,
    EPS,
    Caches,
    Heads,
    assert_same_caches,
    inputs_of,
    reference,
    request_rows,
    rows_slice,
    run,
    weights_of,
    without_gate,
)

SMALL = Heads()
# FP32 arithmetic, or products of TF32 parts: 16 steps of 3 products whose sums are truncated, 2^-23 each,
# make 6e-6 of the magnitudes that are summed, and a norm enlarges what is left where they cancel.
TOLERANCE = 2e-5 if DEVICE.type == "cpu" else 1e-4


def chunked(inputs: DeltaInputs, weights: DeltaWeights, caches: Caches, rows: RequestRows) -> Tensor:
    """The launches, into memory that holds 7 before."""
    dtype = torch.float32 if inputs.z is None else inputs.z.dtype
    shape = (inputs.mixed.shape[0], caches.state.shape[2] * caches.state.shape[4])
    out = torch.full(shape, 7.0, dtype=dtype, device=DEVICE)
    chunk_gated_delta_triton(inputs, weights, caches.ring, caches.state, rows, EPS, out)
    return out


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def check(
    heads: Heads,
    caches: Caches,
    rows: RequestRows,
    inputs: DeltaInputs,
    weights: DeltaWeights,
    tolerance: float = TOLERANCE,
) -> None:
    """Outputs, states and rings as the references leave them, and nothing else touched."""
    expected_caches = caches.clone()
    expected = reference(inputs, weights, expected_caches, rows, every_row=False)
    assert_near(chunked(inputs, weights, caches, rows), expected, tolerance)
    assert_near(caches.state, expected_caches.state)
    assert torch.equal(caches.ring.nan_to_num(9.0), expected_caches.ring.nan_to_num(9.0))


@pytest.mark.parametrize("count", [1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_prompts_of_any_length(count: int) -> None:
    """From another slot than the first, beside padding, with NaN between rows and in all other memory."""
    caches = Caches.random(SMALL, requests=3, slots=4)
    caches.move_state(2, 3)
    rows = request_rows([2, -1], [3, 0], [7, 7], count)
    check(SMALL, caches, rows, inputs_of(SMALL, 2 * count, 3, pad=1), weights_of(SMALL))


def test_requests_of_unequal_length() -> None:
    counts = [70, 0, 1, 9, 64]
    caches = Caches.random(SMALL, requests=5, slots=4)
    rows = request_rows([3, 1, 0, -1, 2], [0] * 5, [7] * 5, counts)
    check(SMALL, caches, rows, inputs_of(SMALL, sum(counts), 4), weights_of(SMALL))


@pytest.mark.parametrize("position", [0, 2])
def test_before_the_text_there_are_zeros(position: int) -> None:
    caches = Caches.random(SMALL, requests=1, slots=4, position=position)
    check(SMALL, caches, request_rows([0], [0], [position], 5), inputs_of(SMALL, 5, 5), weights_of(SMALL))


def test_half_precision() -> None:
    half = torch.float16
    caches = Caches.random(SMALL, requests=1, slots=4, dtype=half)
    inputs, weights = inputs_of(SMALL, 70, 6, half, pad=3), weights_of(SMALL, dtype=half)
    check(SMALL, caches, request_rows([0], [0], [7], 70), inputs, weights, tolerance=1e-3)


DIMS = [(16, 16), (64, 64), (128, 128), (256, 32), (32, 256)]


@pytest.mark.parametrize(("key_dim", "value_dim"), DIMS)
def test_head_dimensions(key_dim: int, value_dim: int) -> None:
    """With a gate also where one program of the scan cannot normalise a head."""
    heads = Heads(values=1, key_dim=key_dim, value_dim=value_dim)
    caches = Caches.random(heads, requests=1, slots=2)
    check(heads, caches, request_rows([0], [0], [7], 66), inputs_of(heads, 66, 7), weights_of(heads))


@pytest.mark.parametrize(("keys", "values", "taps"), [(1, 1, 1), (2, 6, 3)])
def test_head_counts_and_taps(keys: int, values: int, taps: int) -> None:
    heads = Heads(keys=keys, values=values, taps=taps)
    caches = Caches.random(heads, requests=1, slots=2)
    check(heads, caches, request_rows([0], [0], [7], 20), inputs_of(heads, 20, 8), weights_of(heads))


def test_without_a_gate_the_rule_itself_comes_out() -> None:
    caches = Caches.random(SMALL, requests=1, slots=2)
    inputs = without_gate(inputs_of(SMALL, 66, 9))
    check(SMALL, caches, request_rows([0], [0], [7], 66), inputs, weights_of(SMALL))


ONE_HEAD = Heads(values=1)


def in_pieces(inputs: DeltaInputs, caches: Caches, pieces: list[int]) -> Tensor:
    start, parts = 0, []
    for count in pieces:
        piece = rows_slice(inputs, start, start + count)
        parts.append(chunked(piece, weights_of(ONE_HEAD), caches, request_rows([0], [0], [start], count)))
        start += count
    return torch.cat(parts)


@pytest.mark.parametrize("pieces", [[64, 64, 12], [128, 12], [64, 76]])
def test_pieces_of_whole_chunks_leave_the_bits_of_the_whole(pieces: list[int]) -> None:
    inputs = inputs_of(ONE_HEAD, 140, 10)
    whole = Caches.random(ONE_HEAD, requests=1, slots=4, position=0)
    split = whole.clone()
    expected = in_pieces(inputs, whole, [140])
    assert torch.equal(in_pieces(inputs, split, pieces), expected)
    assert torch.equal(split.state[0, 0], whole.state[0, 0])
    for back in range(1, 4):
        assert torch.equal(split.ring[0, (140 - back) % 7], whole.ring[0, (140 - back) % 7])


def test_other_pieces_change_no_more_than_rounding() -> None:
    inputs = inputs_of(ONE_HEAD, 140, 10)
    whole = Caches.random(ONE_HEAD, requests=1, slots=4, position=0)
    split = whole.clone()
    expected = in_pieces(inputs, whole, [140])
    assert_near(in_pieces(inputs, split, [1, 70, 69]), expected)
    assert_near(split.state[0, 0], whole.state[0, 0])


def test_a_request_gets_the_same_bits_in_every_batch() -> None:
    weights, counts = weights_of(SMALL), [5, 70, 66]
    inputs = inputs_of(SMALL, sum(counts), 11)
    caches = Caches.random(SMALL, requests=3, slots=2)
    alone = caches.clone()
    out = chunked(inputs, weights, caches, request_rows([1, 2, 0], [0] * 3, [7] * 3, counts))
    own = chunked(rows_slice(inputs, 5, 75), weights, alone, request_rows([2], [0], [7], 70))
    assert torch.equal(own, out[5:75])
    assert torch.equal(alone.state[2, 0], caches.state[2, 0])


def test_the_decode_step_goes_on_from_the_state() -> None:
    """As after a prompt that the scan has taken."""
    weights, inputs = weights_of(SMALL), inputs_of(SMALL, 71, 12)
    ours = Caches.random(SMALL, requests=1, slots=4, position=0)
    scanned = ours.clone()
    prompt, step = rows_slice(inputs, 0, 67), rows_slice(inputs, 67, 71)
    chunked(prompt, weights, ours, request_rows([0], [0], [0], 67))
    run(prompt, weights, scanned, request_rows([0], [0], [0], 67), every_row=False)
    verify = request_rows([0], [0], [67], 4)
    expected = run(step, weights, scanned, verify, every_row=True)
    assert_near(run(step, weights, ours, verify, every_row=True), expected)
    assert_near(ours.state, scanned.state)


def test_rows_behind_one_that_forgets_everything_keep_their_precision() -> None:
    """The log decays sum up to -2e4, whose neighbours in FP32 are 0.002 apart; rows after it decay by 0.3."""
    heads = Heads(values=1)
    weights = replace(
        weights_of(heads),
        a_log=torch.full((1,), 3.0, device=DEVICE),
        dt_bias=torch.full((1,), -4.2, device=DEVICE),
    )
    inputs = inputs_of(heads, 40, 13)
    inputs.a.zero_()
    inputs.a[5] = 1000.0
    caches = Caches.random(heads, requests=1, slots=1)
    check(heads, caches, request_rows([0], [0], [7], 40), inputs, weights)


@triton.jit
def invert(p_lower, p_out, BT: tl.constexpr):
    o_square = tl.arange(0, BT)[:, None] * BT + tl.arange(0, BT)[None, :]
    tl.store(p_out + o_square, unit_lower_inverse(tl.load(p_lower + o_square), BT // 2))


@pytest.mark.parametrize("kind", ["alike", "opposed", "random"])
def test_inverse_of_overlaps(kind: str) -> None:
    """All keys the same, or of alternating sign: powers of the matrix reach 64 over 32, the inverse 1."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(CHUNK, 48, generator=generator, dtype=torch.float64)
    if kind != "random":
        keys = keys[:1].expand(CHUNK, -1) + 0.01 * keys
    if kind == "opposed":
        keys = keys * (-1.0) ** torch.arange(CHUNK)[:, None]
    keys = torch.nn.functional.normalize(keys, dim=1)
    lower = (keys @ keys.T).tril(-1).float().to(DEVICE)
    out = torch.full_like(lower, torch.nan)
    invert[(1,)](lower, out, CHUNK)
    exact = torch.linalg.inv(lower.double() + torch.eye(CHUNK, device=DEVICE))
    assert exact.abs().max() < 2
    # A row of the substitution sums 31 rounded products of numbers below 2.
    assert_near(out, exact, 2e-5)


def tf32(x: np.ndarray) -> np.ndarray:
    """Rounded to 11 bits, halves away from zero."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def truncated_product(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """FP32 ``total + a @ b``, eight terms at a time, each sum cut off toward zero as tensor cores may do."""
    for k in range(0, a.shape[1], 8):
        exact = total.astype(np.float64) + a[:, k : k + 8].astype(np.float64) @ b[k : k + 8]
        total = exact.astype(np.float32)
        total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total)
    return total


def tensor_core_dot(_: object, a: Any, b: Any, d: Any, precision: Any, _imprecise: int) -> TensorHandle:
    """``tl.dot`` of FP32 as a GPU computes it with TF32 parts, instead of the interpreter's FP32."""
    x, y, total = a.data, b.data, np.zeros_like(d.data)
    x_high, y_high = tf32(x), tf32(y)
    if precision == INPUT_PRECISION.TF32x3:
        total = truncated_product(tf32(x - x_high), y_high, total)
        total = truncated_product(x_high, tf32(y - y_high), total)
    else:
        assert precision == INPUT_PRECISION.TF32
    return TensorHandle(truncated_product(x_high, y_high, total) + d.data, d.dtype.scalar)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU computes so itself")
def test_products_of_tf32_parts_are_as_precise_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the public model's head dimensions; products of one part each would be off by a hundredth."""
    heads = Heads(values=1, key_dim=128, value_dim=128)
    inputs, weights = inputs_of(heads, 130, 3), weights_of(heads)
    weights = replace(weights, dt_bias=weights.dt_bias - 4)  # states outlive a chunk
    caches = Caches.random(heads, requests=1, slots=1)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", tensor_core_dot)
    check(heads, caches.clone(), request_rows([0], [0], [7], 130), inputs, weights)
    monkeypatch.setattr(module, "_PRECISION", tl.constexpr("tf32"))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(heads, caches, request_rows([0], [0], [7], 130), inputs, weights)


def test_no_requests_and_only_padding_write_nothing() -> None:
    caches = Caches.random(SMALL, requests=2, slots=4)
    before, weights = caches.clone(), weights_of(SMALL)
    out = chunked(inputs_of(SMALL, 6, 0), weights, caches, request_rows([-1, -1], [0, 3], [7, 7], 3))
    assert (out == 7).all()
    assert chunked(inputs_of(SMALL, 0, 0), weights, caches, request_rows([], [], [], 1)).shape[0] == 0
    assert_same_caches(caches, before)


def test_any_cut_of_a_head_gives_its_rows() -> None:
    inputs, weights, rows = inputs_of(SMALL, 66, 0), weights_of(SMALL), request_rows([0], [0], [7], 66)
    caches = Caches.random(SMALL, 1, 2)
    other = caches.clone()
    expected = chunked(inputs, weights, caches, rows)
    arguments = (inputs, weights, other.ring, other.state, rows, EPS, None)
    assert_near(chunk_gated_delta_triton(*arguments, config=ChunkConfig(16, 1, 1)), expected)
    for columns in (8, 24):
        with pytest.raises(InputError, match=f"columns must divide Dv = 32 .* got {columns}"):
            chunk_gated_delta_triton(*arguments, config=ChunkConfig(columns, 1, 1))


def test_wrong_inputs_are_refused_before_anything_is_written() -> None:
    inputs, weights, rows = inputs_of(SMALL, 4, 0), weights_of(SMALL), request_rows([0, 1], [0, 0], [7, 7], 2)
    caches = Caches.random(SMALL, 2, 2)
    before = caches.clone()
    with pytest.raises(InputError, match="rows"):
        chunk_gated_delta_triton(inputs, weights, caches.ring, caches.state, replace(rows, longest=3))
    with pytest.raises(InputError, match=r"out must be torch\.float32"):
        chunk_gated_delta_triton(
            inputs, weights, caches.ring, caches.state, rows, out=torch.empty(4, 3, device=DEVICE)
        )
    assert_same_caches(caches, before)


def test_the_form_follows_from_the_gpu_and_is_named_with_its_reason() -> None:
    assert choose_prefill_form("auto", (9, 0)) == choose_prefill_form("auto", None)
    assert choose_prefill_form("auto", (8, 0)) == ("chunk", "the fastest that can run")
    form, why = choose_prefill_form("auto", (7, 0))
    assert form == "scan" and why.startswith("chunk cannot run: ") and why.endswith("the GPU has 7.0")
    assert choose_prefill_form("scan", (9, 0)) == ("scan", "asked for")
    with pytest.raises(InputError, match="'chunk' cannot run: it needs tensor cores"):
        choose_prefill_form("chunk", (7, 5))
    with pytest.raises(InputError, match="'fast' is unknown, expected one of auto, chunk, scan"):
        choose_prefill_form("fast", None)


@pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 0), reason="scan is chosen"
)
def test_both_forms_can_be_asked_for() -> None:
    inputs, weights, rows = inputs_of(SMALL, 5, 0), weights_of(SMALL), request_rows([0], [0], [7], 5)
    first = Caches.random(SMALL, 1, 2)
    results = {}
    for form in ("auto", "chunk", "scan"):
        caches = first.clone()
        results[form] = prefill_gated_delta(inputs, weights, caches.ring, caches.state, rows, EPS, form=form)
    assert torch.equal(results["auto"], results["chunk"])
    assert torch.equal(results["scan"], run(inputs, weights, first.clone(), rows, every_row=False))
    assert not torch.equal(results["chunk"], results["scan"])
    assert_near(results["chunk"], results["scan"])
