"""The recurrent layers on the Triton kernels, one group of rows after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from page4.kernels.causal_conv_triton import causal_conv_triton
from page4.kernels.gated_delta_dispatch import prefill_gated_delta
from page4.kernels.gated_delta_triton import DeltaInputs, DeltaWeights, gated_delta_triton, norms_in_kernel
from page4.kernels.recurrent_rows import RequestRows
from page4.kvcache.recurrent import ConvSlots, GatedDeltaSlots

from .rows import RowBatch, RowGroup

if TYPE_CHECKING:
    from .gated_delta_net import GatedDeltaNet
    from .ple import PerLayerEmbedding


def mix_triton(layer: GatedDeltaNet, x: Tensor, batch: RowBatch, slots: GatedDeltaSlots) -> Tensor:
    """Output of a Gated DeltaNet layer for a step's rows ``[N, H] -> [N, H]``; advances its state."""
    weights = DeltaWeights(layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias, layer.norm.weight)
    mixed, a, b = layer.in_proj_qkv(x), layer.in_proj_a(x), layer.in_proj_b(x)
    normed = norms_in_kernel(layer.key_dim, layer.value_dim)
    z = layer.in_proj_z(x) if normed else None
    width = layer.value_heads * layer.value_dim
    out = torch.empty(x.shape[0], width, dtype=x.dtype if normed else torch.float32, device=x.device)
    for group in batch.groups:
        own = slice(group.start, group.stop)
        inputs = DeltaInputs(mixed[own], a[own], b[own], None if z is None else z[own])
        call = (inputs, weights, slots.conv.state, slots.state, _request_rows(batch, group))
        if group.decode:
            gated_delta_triton(*call, every_row=True, eps=layer.eps, out=out[own])
        else:
            prefill_gated_delta(*call, eps=layer.eps, out=out[own])
    if normed:
        return layer.out_proj(out)
    return layer.finish(out.unflatten(1, (layer.value_heads, layer.value_dim)), x)


def convolve_triton(layer: PerLayerEmbedding, normed: Tensor, batch: RowBatch, slots: ConvSlots) -> Tensor:
    """PLE's convolution of a step's rows, FP32 ``[N, S*H]``; advances its state."""
    convolved = torch.empty_like(normed)
    for group in batch.groups:
        own = slice(group.start, group.stop)
        causal_conv_triton(
            normed[own], layer.conv1d.weight.squeeze(1), slots.state, _request_rows(batch, group),
            layer.dilation, convolved[own],
        )  # fmt: skip
    return convolved


def _request_rows(batch: RowBatch, group: RowGroup) -> RequestRows:
    positions = batch.positions[group.start : group.stop]
    return RequestRows(group.requests, group.read_slots, positions, group.length)
