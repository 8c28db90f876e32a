"""What float64 says of a Gated DeltaNet launch, one request at a time."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from page4.kernels.gated_delta import causal_conv1d_reference, recurrent_gated_delta_reference
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights


def exact_request(
    inputs: DeltaInputs, weights: DeltaWeights, window: Tensor, state: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Outputs ``[T, Hv Dv]`` and states ``[T, Hv, Dk, Dv]`` of a request's rows, float64.

    Args:
        inputs: of its T rows.
        weights: of the layer.
        window: ``[L, C]``, the convolution's inputs before the rows, oldest first.
        state: ``[Hv, Dk, Dv]`` before the rows.
        eps: of the norm.
    """
    heads, key_dim, value_dim = state.shape
    keys = (weights.conv.shape[0] - heads * value_dim) // 2
    y, _ = causal_conv1d_reference(inputs.mixed.double()[None], weights.conv.double(), window.double()[None])
    q, k, v = F.silu(y).split((keys, keys, heads * value_dim), -1)
    g = -weights.a_log.double().exp() * F.softplus(inputs.a.double() + weights.dt_bias.double())
    o, states = recurrent_gated_delta_reference(
        q.unflatten(-1, (-1, key_dim)),
        k.unflatten(-1, (-1, key_dim)),
        v.unflatten(-1, (heads, value_dim)),
        g[None],
        inputs.b.double().sigmoid()[None],
        state.double()[None],
    )
    out = o[0]
    if inputs.z is not None:
        out = out * (out.square().mean(-1, keepdim=True) + eps).rsqrt() * weights.norm.double()
        out = out * inputs.z.double().sigmoid().unflatten(-1, (heads, value_dim))
    return out.flatten(-2), states[0]
