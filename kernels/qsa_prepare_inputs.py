"""What the prepare kernel reads and writes, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.codecs import (
    BYTE_FLOATS,
    STORAGE_DTYPES,
    check_kv_format,
    check_scale,
    check_token_scales,
)
from page4.kernels.errors import InputError
from page4.kernels.qsa_prepare import PAGE_TOKENS
from page4.kernels.step_rows import StepRows


@dataclass(frozen=True)
class QSANorms:
    """Zero-centred norm weights of a layer: ``q`` and ``k`` ``[D]``, ``index_q`` and ``index_k`` ``[Di]``."""

    q: Tensor
    k: Tensor
    index_q: Tensor
    index_k: Tensor


@dataclass(frozen=True)
class QSAStorage:
    """What a layer keeps, written in place.

    Attributes:
        kv_format: format of K and V.
        k_pages, v_pages: ``[P, Hkv, 16, D]`` in the format's storage dtype.
        ring: ``[requests, cap, Di]`` raw index keys; position p stands at ``p % cap``.
        compressed_pages: ``[P, 16 / r, Di]``.
        k_scale, v_scale: static scales; 1.0 for formats without.
        k_scale_pages, v_scale_pages: FP32 ``[P, Hkv, 16]``, the scales per token and head of int8.
    """

    kv_format: str
    k_pages: Tensor
    v_pages: Tensor
    ring: Tensor
    compressed_pages: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_scale_pages: Tensor | None = None
    v_scale_pages: Tensor | None = None


def check_inputs(
    q_gate: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    norms: QSANorms,
    angles: Tensor,
    rows: StepRows,
    storage: QSAStorage,
) -> None:
    """Refuse what the kernel would misread; looks at shapes, dtypes and strides only, never at the device.

    Raises:
        InputError: the first disagreement found.
    """
    for name, x, axes in (("q_gate", q_gate, 3), ("k", k, 3), ("index", index, 2), ("ring", storage.ring, 3)):
        if x.ndim != axes:
            raise InputError(f"{name} must have {axes} axes, got {list(x.shape)}")
    dim, index_dim = k.shape[2], storage.ring.shape[2]
    _check_projections(q_gate, k, v, index, index_dim)
    _check_norms(norms, angles, dim, index_dim)
    _check_rows(rows, k.shape[0])
    _check_storage(storage, k.shape[1], dim, index_dim)


def _check_projections(q_gate: Tensor, k: Tensor, v: Tensor, index: Tensor, index_dim: int) -> None:
    rows, _, dim = k.shape
    if q_gate.shape[0] != rows or q_gate.shape[2] != 2 * dim or v.shape != k.shape:
        raise InputError(
            f"q_gate {list(q_gate.shape)}, k {list(k.shape)} and v {list(v.shape)} must be [N, Hq, 2 D], "
            "[N, Hkv, D] and [N, Hkv, D]"
        )
    if index.shape[0] != rows or index.shape[1] % index_dim or index.shape[1] <= index_dim:
        raise InputError(
            f"index must be [{rows}, (Hi + 1) * {index_dim}] with Hi > 0, got {list(index.shape)}"
        )
    for name, x in (("q_gate", q_gate), ("k", k), ("v", v), ("index", index)):
        if x.dtype != q_gate.dtype:
            raise InputError(f"{name} is {x.dtype}, q_gate {q_gate.dtype}; they must agree")
        if rows and not x[0].is_contiguous():
            raise InputError(f"{name} must be contiguous within a row, its strides are {x.stride()}")


def _check_norms(norms: QSANorms, angles: Tensor, dim: int, index_dim: int) -> None:
    for name, weight, size in (
        ("q", norms.q, dim),
        ("k", norms.k, dim),
        ("index_q", norms.index_q, index_dim),
        ("index_k", norms.index_k, index_dim),
    ):
        if weight.shape != (size,) or not weight.is_contiguous():
            raise InputError(f"norm weight {name} must be contiguous [{size}], got {list(weight.shape)}")
    if angles.ndim != 2 or angles.dtype != torch.float32 or not angles.is_contiguous():
        raise InputError("angles must be contiguous FP32 [positions, rotary_dim]")
    sizes = {"D": dim, "Di": index_dim, "rotary_dim": angles.shape[1]}
    if angles.shape[1] < 2 or any(size & (size - 1) for size in sizes.values()):
        raise InputError(f"D, Di and rotary_dim must be powers of two, got {sizes}")
    if angles.shape[1] > min(dim, index_dim):
        raise InputError(f"rotary_dim must not exceed D and Di, got {sizes}")


def _check_rows(rows: StepRows, num_rows: int) -> None:
    for name, x, dtype in (
        ("positions", rows.positions, torch.int64),
        ("request", rows.request, torch.int32),
        ("index", rows.index, torch.int32),
        ("count", rows.count, torch.int32),
        ("slots", rows.slots, torch.int64),
    ):
        if x.shape != (num_rows,) or x.dtype != dtype or not x.is_contiguous():
            raise InputError(f"rows.{name} must be contiguous {dtype} [{num_rows}], got {list(x.shape)}")
    tables = rows.block_tables
    if tables.ndim != 2 or tables.dtype != torch.int64 or tables.stride(1) != 1:
        raise InputError(f"block_tables must be int64 [requests, pages], got {list(tables.shape)}")


def _check_storage(storage: QSAStorage, kv_heads: int, dim: int, index_dim: int) -> None:
    check_kv_format(storage.kv_format)
    pages = storage.k_pages.shape[0]
    shape, dtype = (pages, kv_heads, PAGE_TOKENS, dim), STORAGE_DTYPES[storage.kv_format]
    for name, x in (("k_pages", storage.k_pages), ("v_pages", storage.v_pages)):
        if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
            raise InputError(
                f"{name} must be contiguous {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}"
            )
    compressed, ring = storage.compressed_pages, storage.ring
    per_page = compressed.shape[1] if compressed.ndim == 3 else 0
    if (
        compressed.shape != (pages, per_page, index_dim)
        or per_page == 0
        or PAGE_TOKENS % per_page
        or not compressed.is_contiguous()
    ):
        raise InputError(
            f"compressed_pages must be contiguous [{pages}, 16 / r, {index_dim}], "
            f"got {list(compressed.shape)}"
        )
    ratio = PAGE_TOKENS // per_page
    if ring.shape[1] < ratio or not ring.is_contiguous():
        raise InputError(f"the ring must be contiguous [requests, >= {ratio}, Di], got {list(ring.shape)}")
    for name, scale in (("k_scale", storage.k_scale), ("v_scale", storage.v_scale)):
        check_scale(scale, name)
        if storage.kv_format not in BYTE_FLOATS and scale != 1.0:
            raise InputError(f"{name} of format {storage.kv_format} must be 1.0, got {scale}")
    for name, scales in (("k_scale_pages", storage.k_scale_pages), ("v_scale_pages", storage.v_scale_pages)):
        check_token_scales(scales, storage.kv_format, shape[:3], name)
