"""What float64, or eager FP32, says of a Gated DeltaNet layer between its projections, request by request."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.kernels.gated_delta import (
    causal_conv1d_reference,
    chunk_gated_delta_reference,
    recurrent_gated_delta_reference,
)
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights


def exact_request(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    window: Tensor,
    state: Tensor,
    eps: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[T, Hv Dv]`` and states ``[T, Hv, Dk, Dv]`` of a request's rows.

    Args:
        inputs: of its T rows.
        weights: of the layer.
        window: ``[L, C]``, the convolution's inputs before the rows, oldest first.
        state: ``[Hv, Dk, Dv]`` before the rows.
        eps: of the norm.
        dtype: of the computation and its results, float64 or FP32.
    """
    o, states = recurrent_gated_delta_reference(*_rule_inputs(inputs, weights, window, state, dtype))
    return _normalised(o[0], inputs, weights, eps), states[0]


def exact_prompt(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    window: Tensor,
    state: Tensor,
    eps: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[T, Hv Dv]`` and the last state ``[Hv, Dk, Dv]`` of many rows; arguments as above.

    States after every row of a long prompt would not fit into memory.
    """
    o, last = chunk_gated_delta_reference(*_rule_inputs(inputs, weights, window, state, dtype))
    return _normalised(o[0], inputs, weights, eps), last[0]


def _rule_inputs(
    inputs: DeltaInputs, weights: DeltaWeights, window: Tensor, state: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta and the state, as a batch of one request."""
    heads, key_dim, value_dim = state.shape
    keys = (weights.conv.shape[0] - heads * value_dim) // 2
    mixed, conv = inputs.mixed.to(dtype), weights.conv.to(dtype)
    y, _ = causal_conv1d_reference(mixed[None], conv, window.to(dtype)[None])
    q, k, v = F.silu(y).split((keys, keys, heads * value_dim), -1)
    g = -weights.a_log.to(dtype).exp() * F.softplus(inputs.a.to(dtype) + weights.dt_bias.to(dtype))
    return (
        q.unflatten(-1, (-1, key_dim)),
        k.unflatten(-1, (-1, key_dim)),
        v.unflatten(-1, (heads, value_dim)),
        g[None],
        inputs.b.to(dtype).sigmoid()[None],
        state.to(dtype)[None],
    )


def _normalised(o: Tensor, inputs: DeltaInputs, weights: DeltaWeights, eps: float) -> Tensor:
    """``[T, Hv, Dv] -> [T, Hv Dv]`` with norm and gate, if the inputs have one."""
    if inputs.z is not None:
        o = o * (o.square().mean(-1, keepdim=True) + eps).rsqrt() * weights.norm.to(o.dtype)
        o = o * inputs.z.to(o.dtype).sigmoid().unflatten(-1, o.shape[1:])
    return o.flatten(-2)
