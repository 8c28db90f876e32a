"""Zero-centred RMSNorm and rotary position embedding: the two row-wise transforms every path shares."""

from __future__ import annotations

import torch
from torch import Tensor

from page4.kernels.errors import InputError


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Statistics are taken in FP32, or in FP64 when the caller asks for a float64 oracle."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm_zero_centred(
    x: Tensor, weight: Tensor, eps: float = 1e-6, group_size: int | None = None
) -> Tensor:
    """RMSNorm whose weight is stored as its distance from one.

    Formula: ``y = x * rsqrt(mean(x^2) + eps) * (1 + weight)``, with the mean taken over the last axis, or
    over each run of ``group_size`` consecutive features (the per-stream norm of a hyper-connection stack).

    Shapes: ``x`` is ``[..., C]``, ``weight`` is ``[C]``, the result is ``[..., C]`` in the dtype of ``x``.
    Statistics and the scaling are FP32 (FP64 for float64 inputs).

    Raises:
        InputError: ``weight`` does not match the last axis, or ``group_size`` does not divide it.

    Source: Qwen4Exp (`Qwen4ExpTextRMSNorm` in transformers).
    """
    channels = x.shape[-1]
    if weight.shape != (channels,):
        raise InputError(f"norm weight has shape {list(weight.shape)}; the input needs [{channels}]")
    groups = channels if group_size is None else group_size
    if groups <= 0 or channels % groups:
        raise InputError(f"group_size {groups} does not divide the {channels} features")
    wide = x.to(_at_least_fp32(x.dtype))
    gain = 1.0 + weight.to(wide.dtype)
    grouped = wide.unflatten(-1, (-1, groups))  # [..., C / group_size, group_size]
    normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(-2) * gain).to(x.dtype)


def rotary_cos_sin(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables of the rotary embedding at the given positions.

    Formula: frequency ``i`` of ``rotary_dim / 2`` is ``theta^(-2i / rotary_dim)``; the angle is position
    times frequency; the half table is written twice (NeoX layout: feature ``i`` pairs with
    ``i + rotary_dim / 2``).

    Shapes: ``positions`` is an integer tensor ``[N]``; both results are FP32 ``[N, rotary_dim]``.

    Raises:
        InputError: ``rotary_dim`` is not a positive even number, or ``theta`` is not positive.

    Source: Su et al., RoFormer (2021); half layout of GPT-NeoX.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise InputError(f"rotary_dim must be a positive even number, got {rotary_dim}")
    if not theta > 0:
        raise InputError(f"theta must be positive, got {theta}")
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    frequency = 1.0 / theta**exponent  # [rotary_dim / 2]
    angle = positions.to(torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)  # [N, rotary_dim]
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading features of every head; the remaining features pass through.

    Formula: ``y[:rot] = x[:rot] * cos + rotate_half(x[:rot]) * sin`` with ``rotate_half(a, b) = (-b, a)`` on
    halves.

    Shapes: ``x`` is ``[..., heads, D]``, ``cos`` and ``sin`` are ``[..., rot]`` with the same leading axes
    and ``rot <= D``. The result has the shape and dtype of ``x``; the rotation is FP32 (FP64 for float64
    inputs).

    Raises:
        InputError: ``rot`` is larger than ``D``.

    Source: GPT-NeoX partial rotary embedding.
    """
    rot = cos.shape[-1]
    if rot > x.shape[-1]:
        raise InputError(f"rotary_dim {rot} is larger than the head dimension {x.shape[-1]}")
    compute = _at_least_fp32(x.dtype)
    cos, sin = cos.unsqueeze(-2).to(compute), sin.unsqueeze(-2).to(compute)  # [..., 1, rot]
    turned, kept = x[..., :rot].to(compute), x[..., rot:]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated.to(x.dtype), kept), dim=-1)
