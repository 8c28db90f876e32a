"""Quantised checkpoints written in the test, one value at a time and by no code of the loader."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Encoded = tuple[dict[str, Tensor], Tensor]
"""Stored tensors by name, and the weight that they mean, FP32."""

GROUP = 32
FP8_MAX = 448.0


def block_fp8(name: str, weight: Tensor, block: int = 128) -> Encoded:
    """E4M3 codes and ``_scale_inv``, a scale per block."""
    matrices = weight.reshape(-1, *weight.shape[-2:]).double().numpy()
    rows, columns = (-(-size // block) for size in matrices.shape[1:])
    scales = np.ones((len(matrices), rows, columns), dtype=np.float32)
    codes = torch.empty(matrices.shape, dtype=torch.float8_e4m3fn)
    meant = np.empty(matrices.shape, dtype=np.float32)
    for m, r, c in np.ndindex(scales.shape):
        place = m, slice(r * block, (r + 1) * block), slice(c * block, (c + 1) * block)
        scale = np.float32(max(np.abs(matrices[place]).max(), 1e-9) / FP8_MAX)
        scales[m, r, c] = scale
        rounded = torch.from_numpy(matrices[place] / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        codes[place] = rounded
        meant[place] = rounded.double().numpy() * np.float64(scale)  # one rounding, to FP32
    scale = torch.from_numpy(scales).view(*weight.shape[:-2], rows, columns)
    stored = {name: codes.view(weight.shape), f"{name}_scale_inv": scale}
    return stored, torch.from_numpy(meant).view(weight.shape)


def compressed(name: str, weight: Tensor, symmetric: bool = True) -> Encoded:
    """compressed-tensors' ``pack-quantized`` with groups of 32 inputs."""
    outputs, inputs = weight.shape
    q, z, scale = _int4(weight.double().numpy(), symmetric)
    packed = np.zeros((outputs, -(-inputs // 8)), dtype=np.uint32)
    for n, i in np.ndindex(outputs, inputs):
        packed[n, i // 8] |= np.uint32(q[n, i] + 8) << np.uint32(4 * (i % 8))
    stored = {
        f"{name}_packed": torch.from_numpy(packed.view(np.int32)),
        f"{name}_scale": torch.from_numpy(scale),
        f"{name}_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        zeros = np.zeros((-(-outputs // 8), scale.shape[1]), dtype=np.uint32)
        for n, g in np.ndindex(*z.shape):
            zeros[n // 8, g] |= np.uint32(z[n, g] + 8) << np.uint32(4 * (n % 8))
        stored[f"{name}_zero_point"] = torch.from_numpy(zeros.view(np.int32))
    return stored, _meant(q, z, scale)


def compressed_with_zero_points(name: str, weight: Tensor) -> Encoded:
    """The asymmetric form."""
    return compressed(name, weight, symmetric=False)


def awq(name: str, weight: Tensor) -> Encoded:
    """AWQ's ``gemm`` layout with groups of 32 inputs."""
    outputs, inputs = weight.shape
    q, z, scale = _int4(weight.double().numpy(), symmetric=False)
    scale = scale.astype(np.float16).astype(np.float32)
    packed = np.zeros((inputs, outputs // 8), dtype=np.uint32)
    zeros = np.zeros((scale.shape[1], outputs // 8), dtype=np.uint32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for word, nibble in np.ndindex(outputs // 8, 8):
        n, shift = 8 * word + order[nibble], np.uint32(4 * nibble)
        packed[:, word] |= (q[n] + 8).astype(np.uint32) << shift
        zeros[:, word] |= (z[n] + 8).astype(np.uint32) << shift
    stem = name.removesuffix(".weight")
    stored = {
        f"{stem}.qweight": torch.from_numpy(packed.view(np.int32)),
        f"{stem}.qzeros": torch.from_numpy(zeros.view(np.int32)),
        f"{stem}.scales": torch.from_numpy(scale.T.astype(np.float16).copy()),
    }
    return stored, _meant(q, z, scale)


def encode(
    weights: dict[str, Tensor], chosen: str, encoder: Callable[[str, Tensor], Encoded]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stored tensors, those of weights whose names match ``chosen`` quantised; and what all of them mean."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if re.search(chosen, name):
            parts, meant[name] = encoder(name, weight)
            stored |= parts
        else:
            stored[name] = meant[name] = weight
    return stored, meant


def _int4(weight: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers -8 to 7 ``[N, inputs]``, zero points and FP32 scales ``[N, groups]``."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    if symmetric:
        scale = np.abs(groups).max(-1) / 7.5
        zero = np.zeros(scale.shape, dtype=np.int64)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = (high - low) / 15
        zero = np.clip(np.rint(-8 - low / scale), -8, 7).astype(np.int64)
    scale = scale.astype(np.float32)
    q = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], -8, 7).astype(np.int64)
    return q.reshape(weight.shape), zero, scale


def _meant(q: np.ndarray, zero: np.ndarray, scale: np.ndarray) -> Tensor:
    groups = q.reshape(*scale.shape, GROUP) - zero[..., None]
    exact = groups * scale.astype(np.float64)[..., None]
    return torch.from_numpy(exact.astype(np.float32).reshape(q.shape))
