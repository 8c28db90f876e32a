"""The recurrent half of a linear-attention layer: a causal depthwise convolution and the gated delta rule.

Both functions return enough intermediate state for speculative decoding: after a verify step the state of the
last accepted row is picked by index, so a rejection never recomputes or copies anything.
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from page4.kernels.errors import InputError

L2_NORM_EPS = 1e-6


def causal_conv1d_reference(
    x: Tensor, weight: Tensor, state: Tensor, dilation: int = 1
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution over the rows of a step, without activation.

    Formula: ``y[t, c] = sum_j weight[c, j] * history[t + j * dilation, c]`` with ``history = cat(state, x)``;
    the last tap ``j = k - 1`` reads row ``t`` itself.

    Shapes: ``x`` is ``[B, T, C]``, ``weight`` is ``[C, k]``, ``state`` is ``[B, L, C]`` with
    ``L = (k - 1) * dilation``: the rows before ``x``, oldest first. Returns ``y`` as ``[B, T, C]`` in FP32
    (FP64 for float64 inputs) and ``history`` as ``[B, L + T, C]``; the state after row ``t`` is
    ``history[:, t + 1 : t + 1 + L]``.

    Raises:
        InputError: the channels disagree, or ``state`` does not hold exactly ``L`` rows.

    Source: the short convolution of Gated DeltaNet (Yang et al., 2024); dilation as in Qwen4Exp's PLE layer.
    """
    batch, rows, channels = x.shape
    if weight.ndim != 2 or weight.shape[0] != channels:
        raise InputError(f"convolution weight has shape {list(weight.shape)}; needs [{channels}, k]")
    taps = weight.shape[1]
    length = (taps - 1) * dilation
    if state.shape != (batch, length, channels):
        raise InputError(f"conv state has shape {list(state.shape)}; needs {[batch, length, channels]}")
    history = torch.cat((state, x), dim=1)  # [B, L + T, C]
    compute = torch.promote_types(torch.promote_types(history.dtype, weight.dtype), torch.float32)
    wide, kernel = history.to(compute), weight.to(compute)
    y = wide[:, length:] * kernel[:, taps - 1]
    for tap in range(taps - 1):
        start = tap * dilation
        y = torch.addcmul(y, wide[:, start : start + rows], kernel[:, tap])
    return y, history


def _l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def _check_gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    batch, rows, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[-2:]
    if rows == 0:
        raise InputError("the gated delta rule needs at least one row")
    if q.shape != k.shape:
        raise InputError(f"q has shape {list(q.shape)} but k has {list(k.shape)}; they must be equal")
    if v.shape[:2] != (batch, rows) or value_heads % key_heads:
        raise InputError(
            f"v has shape {list(v.shape)}; needs [{batch}, {rows}, Hv, Dv] with Hv a multiple of {key_heads}"
        )
    for name, gate in (("g", g), ("beta", beta)):
        if gate.shape != (batch, rows, value_heads):
            raise InputError(f"{name} has shape {list(gate.shape)}; needs {[batch, rows, value_heads]}")
    if state.shape != (batch, value_heads, key_dim, value_dim):
        needed = [batch, value_heads, key_dim, value_dim]
        raise InputError(f"state has shape {list(state.shape)}; needs {needed}")


def recurrent_gated_delta_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gated delta rule one row at a time, keeping the state after every row.

    Formula, per value head, with ``q`` and ``k`` l2-normalised (``x * rsqrt(sum x^2 + 1e-6)``), ``q`` scaled
    by ``Dk^-0.5``, and value head ``j`` reading key head ``j // (Hv / Hk)``::

        S  = exp(g_t) * S
        S += k_t (beta_t * (v_t - S^T k_t))^T
        o_t = S^T q_t

    Shapes: ``q``, ``k`` are ``[B, T, Hk, Dk]``, ``v`` is ``[B, T, Hv, Dv]``, ``g`` (log decay, <= 0) and
    ``beta`` are ``[B, T, Hv]``, ``state`` is FP32 ``[B, Hv, Dk, Dv]``. Returns ``o`` as ``[B, T, Hv, Dv]``
    and ``states`` as ``[B, T, Hv, Dk, Dv]``, both FP32 (FP64 for float64 inputs). Meant for the few rows of a
    verify step; a prefill uses :func:`chunk_gated_delta_reference`.

    Raises:
        InputError: shapes that disagree.

    Source: Yang et al., Gated Delta Networks (2024), equation 10.
    """
    _check_gated_delta(q, k, v, g, beta, state)
    compute = torch.promote_types(torch.promote_types(v.dtype, state.dtype), torch.float32)
    heads_per_key = v.shape[2] // k.shape[2]
    q = _l2_normalise(q.to(compute)) * q.shape[-1] ** -0.5
    k = _l2_normalise(k.to(compute))
    q, k = (repeat(x, "b t h d -> b t (h r) d", r=heads_per_key) for x in (q, k))
    v, decay, beta, current = v.to(compute), g.to(compute).exp(), beta.to(compute), state.to(compute)
    outputs, states = [], []
    for t in range(v.shape[1]):
        current = current * decay[:, t, :, None, None]  # [B, Hv, Dk, Dv]
        predicted = k[:, t, :, None, :] @ current  # [B, Hv, 1, Dv]
        correction = beta[:, t, :, None, None] * (v[:, t, :, None, :] - predicted)
        current = current + k[:, t, :, :, None] * correction
        outputs.append((q[:, t, :, None, :] @ current).squeeze(-2))  # [B, Hv, Dv]
        states.append(current)
    return torch.stack(outputs, dim=1), torch.stack(states, dim=1)


def chunk_gated_delta_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk_size: int = 64
) -> tuple[Tensor, Tensor]:
    """The same rule as :func:`recurrent_gated_delta_reference`, in matrix products over chunks of rows.

    Formula, within a chunk, with ``c_i`` the running sum of ``g`` and ``D_ij = exp(c_i - c_j)`` for
    ``j <= i``: the corrections ``U`` of all rows solve the unit lower-triangular system
    ``(I + strict_lower(beta_i * D_ij * k_i.k_j)) U = beta * (V - exp(c) * K S)`` (the WY form of the product
    of Householder-like updates). Solving for both right-hand sides ahead leaves one product with the state
    per chunk::

        U  = solve(beta V) - solve(beta exp(c) K) S
        O  = exp(c) Q S + lower(D * Q K^T) U
        S' = exp(c_last) S + (exp(c_last - c) K)^T U

    A short last chunk is padded with ``g = 0, beta = 0`` rows, which change nothing.

    Shapes and dtypes: as in the recurrent form; returns ``o`` as ``[B, T, Hv, Dv]`` and the final state
    ``[B, Hv, Dk, Dv]``. Differentiable, so training uses it too.

    Raises:
        InputError: shapes that disagree, or a ``chunk_size`` below 1.

    Source: Yang et al., Gated Delta Networks (2024), section 3.3.
    """
    _check_gated_delta(q, k, v, g, beta, state)
    if chunk_size < 1:
        raise InputError(f"chunk_size must be at least 1, got {chunk_size}")
    compute = torch.promote_types(torch.promote_types(v.dtype, state.dtype), torch.float32)
    rows, value_heads = v.shape[1:3]
    heads_per_key = value_heads // k.shape[2]
    chunk_size = min(chunk_size, rows)
    padding = -rows % chunk_size

    def chunked(x: Tensor) -> Tensor:
        """[B, T, H, D] -> [B, H, chunks, chunk_size, D], padded with zero rows."""
        x = torch.nn.functional.pad(x.to(compute), (0, 0, 0, 0, 0, padding))
        return rearrange(x, "b (n c) h d -> b h n c d", c=chunk_size).contiguous()

    def to_value_heads(x: Tensor) -> Tensor:
        return x if heads_per_key == 1 else repeat(x, "b h n i j -> b (h r) n i j", r=heads_per_key)

    q = chunked(_l2_normalise(q.to(compute)) * q.shape[-1] ** -0.5)
    k = chunked(_l2_normalise(k.to(compute)))
    v, beta = chunked(v), chunked(beta[..., None])
    log_decay = chunked(g[..., None]).cumsum(dim=-2)  # [B, Hv, N, C, 1]

    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).triu(1)
    # Mask before the exponential: above the diagonal the difference is positive and could overflow.
    pair_decay = (log_decay - log_decay.mT).masked_fill(future, -torch.inf).exp()  # [B, Hv, N, C, C]
    key_overlap = to_value_heads(k @ k.mT) * pair_decay * beta
    query_overlap = to_value_heads(q @ k.mT) * pair_decay

    q, k = to_value_heads(q), to_value_heads(k)
    right_sides = torch.cat((beta * v, beta * log_decay.exp() * k), dim=-1)
    # unitriangular ignores the diagonal of key_overlap and reads it as one.
    solved = torch.linalg.solve_triangular(key_overlap, right_sides, upper=False, unitriangular=True)
    values, keys_on_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    queries_on_state = q * log_decay.exp()
    last = log_decay[..., -1:, :]  # [B, Hv, N, 1, 1]
    keys_to_state = (k * (last - log_decay).exp()).mT  # [B, Hv, N, Dk, C]
    chunk_decay = last.exp()

    current = state.to(compute)
    outputs = []
    for n in range(v.shape[2]):
        update = values[:, :, n] - keys_on_state[:, :, n] @ current  # [B, Hv, C, Dv]
        outputs.append(queries_on_state[:, :, n] @ current + query_overlap[:, :, n] @ update)
        current = current * chunk_decay[:, :, n] + keys_to_state[:, :, n] @ update
    o = rearrange(torch.stack(outputs, dim=1), "b n h c d -> b (n c) h d")
    return o[:, :rows], current
