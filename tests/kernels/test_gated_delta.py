"""Gated delta rule and causal convolution: three forms agree, and states can be rolled back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from page4.kernels.errors import InputError
from page4.kernels.gated_delta import (
    causal_conv1d_reference,
    chunk_gated_delta_reference,
    recurrent_gated_delta_reference,
)

LENGTHS = [1, 3, 63, 64, 65, 200]


def inputs(
    rows: int, seed: int = 0, dtype: torch.dtype = torch.float32, zero_state: bool = False
) -> dict[str, Any]:
    """A batch of 2 with 2 key heads of 16 and 6 value heads of 24, as the model makes them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    state = normal(2, 6, 16, 24)
    return {
        "q": normal(2, rows, 2, 16).to(dtype),
        "k": normal(2, rows, 2, 16).to(dtype),
        "v": normal(2, rows, 6, 24).to(dtype),
        "g": -torch.nn.functional.softplus(normal(2, rows, 6)).to(dtype),
        "beta": normal(2, rows, 6).sigmoid().to(dtype),
        "state": (torch.zeros_like(state) if zero_state else state).to(dtype),
    }


def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in float64, one request, row and head at a time."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    batch, rows, value_heads, value_dim = v.shape
    out = torch.zeros(batch, rows, value_heads, value_dim, dtype=torch.float64)
    states = torch.zeros(batch, rows, *state.shape[1:], dtype=torch.float64)
    for b in range(batch):
        for head in range(value_heads):
            key_head = head * k.shape[2] // value_heads
            matrix = state[b, head].clone()
            for t in range(rows):
                key = k[b, t, key_head] / (k[b, t, key_head].square().sum() + 1e-6).sqrt()
                query = (
                    q[b, t, key_head] / (q[b, t, key_head].square().sum() + 1e-6).sqrt() / q.shape[-1] ** 0.5
                )
                matrix = g[b, t, head].exp() * matrix
                matrix = matrix + torch.outer(key, beta[b, t, head] * (v[b, t, head] - matrix.T @ key))
                out[b, t, head] = matrix.T @ query
                states[b, t, head] = matrix
    return out, states


@pytest.mark.parametrize("rows", [1, 4, 33])
def test_recurrent_form_equals_the_definition(rows: int) -> None:
    data = inputs(rows)
    out, states = recurrent_gated_delta_reference(**data)
    expected_out, expected_states = naive(**data)
    assert out.dtype == states.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.double(), expected_states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("zero_state", [True, False])
@pytest.mark.parametrize("rows", LENGTHS)
def test_chunk_form_equals_the_recurrent_form(rows: int, zero_state: bool) -> None:
    data = inputs(rows, zero_state=zero_state)
    expected_out, states = recurrent_gated_delta_reference(**data)
    out, final = chunk_gated_delta_reference(**data)
    torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final, states[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 500])
def test_chunk_size_does_not_matter_in_float64(chunk_size: int) -> None:
    data = inputs(130, dtype=torch.float64)
    expected_out, states = recurrent_gated_delta_reference(**data)
    out, final = chunk_gated_delta_reference(**data, chunk_size=chunk_size)
    assert out.dtype == final.dtype == torch.float64
    torch.testing.assert_close(out, expected_out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(final, states[:, -1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rows", LENGTHS)
def test_both_forms_equal_the_public_implementation(rows: int) -> None:
    data = inputs(rows, seed=1)
    arguments = [data[name] for name in ("q", "k", "v", "g", "beta")]
    options = {
        "initial_state": data["state"], "output_final_state": True, "use_qk_l2norm_in_kernel": True
    }  # fmt: skip
    out, final = chunk_gated_delta_reference(**data)
    for public in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        public_out, public_final = public(*arguments, **options)
        torch.testing.assert_close(out, public_out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(final, public_final, rtol=1e-5, atol=1e-5)


def test_strong_decay_does_not_overflow() -> None:
    data = inputs(64)
    data["g"] = torch.full_like(data["g"], -20.0)  # exp(+20 * 63) would be infinite
    out, final = chunk_gated_delta_reference(**data)
    expected_out, states = recurrent_gated_delta_reference(**data)
    torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final, states[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("accepted_rows", [1, 2, 3, 4])
def test_the_state_of_any_row_continues_as_if_later_rows_never_came(accepted_rows: int) -> None:
    data = inputs(4)
    _, states = recurrent_gated_delta_reference(**data)
    kept = {name: x[:, :accepted_rows] if name != "state" else x for name, x in data.items()}
    _, kept_states = recurrent_gated_delta_reference(**kept)
    assert torch.equal(states[:, accepted_rows - 1], kept_states[:, -1])


def test_splitting_a_sequence_gives_the_same_result() -> None:
    data = inputs(150, dtype=torch.float64)
    whole, final = chunk_gated_delta_reference(**data)
    state, parts = data["state"], []
    for start, stop in ((0, 1), (1, 66), (66, 150)):
        piece = {name: x[:, start:stop] for name, x in data.items() if name != "state"}
        out, state = chunk_gated_delta_reference(**piece, state=state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-11, atol=1e-11)


def test_half_precision_inputs_accumulate_in_fp32() -> None:
    data = {name: x.half() if name != "state" else x for name, x in inputs(65).items()}
    out, final = chunk_gated_delta_reference(**data)
    expected_out, states = naive(**data)
    assert out.dtype == final.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final.double(), states[:, -1], rtol=1e-5, atol=1e-5)


def test_chunk_form_has_the_gradients_of_the_recurrent_form() -> None:
    gradients = []
    for form in (chunk_gated_delta_reference, recurrent_gated_delta_reference):
        data = {name: x.requires_grad_() for name, x in inputs(20, dtype=torch.float64).items()}
        out, _ = form(**data)
        gradients.append(torch.autograd.grad(out.square().sum(), list(data.values())))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", [chunk_gated_delta_reference, recurrent_gated_delta_reference])
@pytest.mark.parametrize("name", ["q", "v", "g", "beta", "state"])
def test_shapes_that_disagree_are_refused(form: Callable[..., tuple[Tensor, Tensor]], name: str) -> None:
    data = inputs(4)
    data[name] = data[name][:, :-1]
    with pytest.raises(InputError):
        form(**data)


@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (4, 3), (2, 1), (1, 1)])
def test_convolution_equals_a_padded_conv1d(taps: int, dilation: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 19, 5), torch.randn(5, taps)
    length = (taps - 1) * dilation
    y, history = causal_conv1d_reference(x, weight, torch.zeros(2, length, 5), dilation)
    padded = torch.nn.functional.pad(x.mT, (length, 0))
    expected = torch.nn.functional.conv1d(padded, weight[:, None], groups=5, dilation=dilation).mT
    torch.testing.assert_close(y, expected)
    assert torch.equal(history[:, length:], x)


@pytest.mark.parametrize("dilation", [1, 3])
def test_convolution_continues_from_the_history_of_any_row(dilation: int) -> None:
    torch.manual_seed(0)
    length = 3 * dilation
    x, weight, state = torch.randn(2, 12, 5), torch.randn(5, 4), torch.randn(2, length, 5)
    whole, history = causal_conv1d_reference(x, weight, state, dilation)
    for row in range(11):
        after = history[:, row + 1 : row + 1 + length]
        rest, _ = causal_conv1d_reference(x[:, row + 1 :], weight, after, dilation)
        assert torch.equal(rest, whole[:, row + 1 :])


def test_convolution_accumulates_in_fp32() -> None:
    x, state = torch.full((1, 1, 1), 60000.0).half(), torch.full((1, 3, 1), 60000.0).half()
    y, history = causal_conv1d_reference(x, torch.ones(1, 4).half(), state)
    assert y.item() == 4 * x.float().item()  # beyond FP16
    assert history.dtype == torch.float16


@pytest.mark.parametrize(
    ("weight", "state"), [((6, 4), (2, 3, 5)), ((5, 4), (2, 2, 5)), ((5, 4), (1, 3, 5)), ((5, 4), (2, 3, 4))]
)
def test_convolution_shapes_that_disagree_are_refused(
    weight: tuple[int, ...], state: tuple[int, ...]
) -> None:
    with pytest.raises(InputError):
        causal_conv1d_reference(torch.zeros(2, 7, 5), torch.zeros(weight), torch.zeros(state))
