"""Gated DeltaNet: the linear-attention mixer of three layers out of four."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from page4.kernels.backend import Backend
from page4.kernels.gated_delta import (
    causal_conv1d_reference,
    chunk_gated_delta_reference,
    recurrent_gated_delta_reference,
)
from page4.kvcache.recurrent import GatedDeltaSlots

from .config import Qwen4ExpConfig
from .rows import RowBatch
from .weights import Weight, projection


class GatedDeltaNet(nn.Module):
    """``S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S^T k_t)^T``, ``o_t = S_t^T q_t``, gated and normalised.

    ``beta = sigmoid(b)``, ``g = -exp(A_log) softplus(a + dt_bias)``; q, k, v pass a depthwise causal
    convolution with SiLU; the output is RMS-normalised (plain weight) and gated by ``sigmoid(z)``.
    Source: Yang, Kautz & Hatamizadeh 2024 (arXiv 2412.06464), gates as in Qwen4Exp.
    """

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.eps = config.rms_norm_eps
        self.backend: Backend = "reference"
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.split = (keys, keys, values)
        hidden = config.hidden_size
        self.in_proj_qkv = projection(2 * keys + values, hidden)
        self.in_proj_z = projection(values, hidden)
        self.in_proj_b = projection(self.value_heads, hidden)
        self.in_proj_a = projection(self.value_heads, hidden)
        self.out_proj = projection(hidden, values, gain=0.1)
        self.conv1d = Weight(2 * keys + values, 1, config.linear_conv_kernel_dim, std=0.3)
        self.norm = Weight(self.value_dim, mean=1.0)
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(1, 16).log())
        # As in Mamba-2: time constants spread log-uniformly, so that heads remember 1 to 1000 tokens.
        low, high = math.log(0.001), math.log(0.1)
        step = torch.exp(torch.rand(self.value_heads) * (high - low) + low)
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay ``g`` and write strength ``beta``, FP32: ``[N, H] -> 2 x [N, Hv]``."""
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        return g, self.in_proj_b(x).float().sigmoid()

    def heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """SiLU of the convolution's ``[..., C]``, split into q, k ``[..., Hk, Dk]``, v ``[..., Hv, Dv]``."""
        q, k, v = F.silu(convolved).split(self.split, -1)
        return (
            q.unflatten(-1, (self.key_heads, self.key_dim)),
            k.unflatten(-1, (self.key_heads, self.key_dim)),
            v.unflatten(-1, (self.value_heads, self.value_dim)),
        )

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        """Gated norm and output projection of ``o [N, Hv, Dv]`` for the mixer's input ``x [N, H]``."""
        o = o.float()
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm.weight.float()
        z = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.value_dim))
        return self.out_proj((o * torch.sigmoid(z.float())).to(x.dtype).flatten(-2))

    def forward(self, x: Tensor, batch: RowBatch, slots: GatedDeltaSlots) -> Tensor:
        """Rows of a step ``[N, H] -> [N, H]``; reads and advances convolution and delta-rule state."""
        if self.backend == "triton":
            from .recurrent_triton import mix_triton  # see Step.kernels

            return mix_triton(self, x, batch, slots)
        mixed = self.in_proj_qkv(x)
        g, beta = self.gates(x)
        o = torch.empty(x.shape[0], self.value_heads, self.value_dim, device=x.device)
        for group in batch.groups:
            inputs = group.rows_of(mixed)
            positions = group.rows_of(batch.positions)[:, 0]
            window = slots.conv.window(group.requests, positions)
            convolved, _ = causal_conv1d_reference(inputs, self.conv1d.weight.squeeze(1), window)
            slots.conv.store(group.requests, positions, inputs)
            q, k, v = self.heads(convolved)
            state = slots.read(group.requests, group.read_slots)
            # A decode step keeps the state after each row; the chunked form yields only the last.
            if group.decode:
                out, states = recurrent_gated_delta_reference(
                    q, k, v, group.rows_of(g), group.rows_of(beta), state
                )
                slots.store_rows(group.requests, states)
            else:
                out, final = chunk_gated_delta_reference(
                    q, k, v, group.rows_of(g), group.rows_of(beta), state
                )
                slots.store_final(group.requests, final)
            group.put_rows(o, out)
        return self.finish(o, x)
