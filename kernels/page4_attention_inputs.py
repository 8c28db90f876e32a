"""What the launchers of grouped attention ask of their tensors, checked on the host without synchronising."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.block_plan import PackedPlan, check_group_rows
from page4.kernels.codecs import STORAGE_DTYPES, check_kv_format, check_scale, check_token_scales
from page4.kernels.errors import InputError
from page4.kernels.qsa_prepare import PAGE_TOKENS

HEAD_DIMS = (32, 64, 128, 256)
MAX_HEADS_PER_KV = 16  # query heads that share a KV head


@dataclass(frozen=True)
class AttentionInputs:
    """One call of grouped attention.

    Attributes:
        q: FP16 or FP32 ``[N, Hq, D]``, any strides over rows and heads.
        k_pages, v_pages: ``[P, Hkv, 16, D]`` in the format's storage dtype, contiguous.
        block_tables: int64 ``[requests, max_pages]``; entries that no listed block needs are never used.
        plan: who reads what; its row groups name rows of ``q`` and requests of ``block_tables``.
        rows_per_group: the most rows that a group of the plan has, 1..8.
        kv_format: name of the storage format.
        k_scale, v_scale: scales of a static format; 1.0 for ``int8``, whose scales are per token and head.
        softmax_scale: factor of ``q . k``, usually ``D ** -0.5``.
        gate: None, or ``[N, Hq, D]`` in q's dtype with any strides over rows and heads: the output is
            multiplied by its sigmoid.
        k_token_scales, v_token_scales: FP32 ``[P, Hkv, 16]`` for ``int8``, else None.
    """

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    plan: PackedPlan
    rows_per_group: int
    kv_format: str
    k_scale: float
    v_scale: float
    softmax_scale: float
    gate: Tensor | None = None
    k_token_scales: Tensor | None = None
    v_token_scales: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what a kernel cannot read.

        Raises:
            InputError: the first thing that is wrong.
        """
        check_kv_format(self.kv_format)
        check_scale(self.k_scale, "k_scale")
        check_scale(self.v_scale, "v_scale")
        check_scale(self.softmax_scale, "softmax_scale")
        check_group_rows(self.rows_per_group)
        self._check_queries()
        self._check_pages()
        self._check_token_scales()
        self._check_plan()

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share a KV head."""
        return self.q.shape[1] // self.k_pages.shape[1]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.q.shape[2]

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.k_pages.shape[1]

    @property
    def groups(self) -> int:
        """G, padding groups included."""
        return self.plan.blocks.shape[0]

    @property
    def gate_strides(self) -> tuple[int, int]:
        """Strides of the gate over rows and heads."""
        return (0, 0) if self.gate is None else (self.gate.stride(0), self.gate.stride(1))

    def outputs(self, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        """The given output tensors, or new ones: ``[N, Hq, D]`` in q's dtype and FP32 ``[N, Hq]``.

        Raises:
            InputError: a given tensor of another shape, dtype or layout.
        """
        q = self.q
        made = []
        for name, given, shape, dtype in (
            ("out", out, q.shape, q.dtype),
            ("lse", lse, q.shape[:2], torch.float32),
        ):
            if given is None:
                given = torch.empty(shape, dtype=dtype, device=q.device)
            elif given.shape != shape or given.dtype != dtype or not given.is_contiguous():
                raise InputError(
                    f"{name} must be contiguous {dtype} {list(shape)}, got {given.dtype} {list(given.shape)}"
                )
            made.append(given)
        return made[0], made[1]

    def _check_queries(self) -> None:
        q, gate = self.q, self.gate
        if q.ndim != 3 or q.shape[2] not in HEAD_DIMS:
            raise InputError(f"q must be [N, Hq, D] with D one of {HEAD_DIMS}, got {list(q.shape)}")
        if q.dtype not in (torch.float16, torch.float32):
            raise InputError(f"q must be float16 or float32, got {q.dtype}")
        if q.stride(2) != 1:
            raise InputError("q must be contiguous within a head")
        if gate is not None and (gate.shape != q.shape or gate.dtype != q.dtype or gate.stride(2) != 1):
            raise InputError(
                f"the gate must be {q.dtype} {list(q.shape)} and contiguous within a head, "
                f"got {gate.dtype} {list(gate.shape)}"
            )

    def _check_pages(self) -> None:
        expected = (PAGE_TOKENS, self.head_dim)
        dtype = STORAGE_DTYPES[self.kv_format]
        for name, pages in (("k_pages", self.k_pages), ("v_pages", self.v_pages)):
            if pages.ndim != 4 or pages.shape[2:] != expected or pages.shape != self.k_pages.shape:
                raise InputError(
                    f"{name} must be [P, Hkv, {PAGE_TOKENS}, {self.head_dim}] and K and V pages alike, "
                    f"got {list(pages.shape)}"
                )
            if pages.dtype != dtype:
                raise InputError(f"{name} in {self.kv_format} must be {dtype}, got {pages.dtype}")
            if not pages.is_contiguous():
                raise InputError(f"{name} must be contiguous")
        query_heads, kv_heads = self.q.shape[1], self.kv_heads
        if query_heads % kv_heads or not 1 <= query_heads // kv_heads <= MAX_HEADS_PER_KV:
            raise InputError(
                f"{query_heads} query heads must be 1..{MAX_HEADS_PER_KV} times {kv_heads} KV heads"
            )

    def _check_token_scales(self) -> None:
        for name in ("k_token_scales", "v_token_scales"):
            check_token_scales(getattr(self, name), self.kv_format, self.k_pages.shape[:3], name)

    def _check_plan(self) -> None:
        plan, tables = self.plan, self.block_tables
        if tables.ndim != 2 or tables.dtype != torch.int64 or tables.stride(1) != 1:
            raise InputError(
                f"block_tables must be int64 [requests, max_pages] with contiguous rows, "
                f"got {tables.dtype} {list(tables.shape)}"
            )
        groups = plan.blocks.shape[0]
        lists = (("blocks", plan.blocks), ("masks", plan.masks))
        for name, values in lists:
            if values.ndim != 2 or values.shape != plan.blocks.shape or not values.is_contiguous():
                raise InputError(f"the plan's {name} must be contiguous [G, U], got {list(values.shape)}")
        per_group = (
            ("counts", plan.counts),
            ("group_request", plan.group_request),
            ("group_start", plan.group_start),
            ("group_rows", plan.group_rows),
        )
        for name, values in per_group:
            if values.shape != (groups,) or not values.is_contiguous():
                raise InputError(f"the plan's {name} must be contiguous [{groups}], got {list(values.shape)}")
        for name, values in (*lists, *per_group):
            if values.dtype != torch.int32:
                raise InputError(f"the plan's {name} must be int32, got {values.dtype}")
        device = self.q.device
        for values in (self.k_pages, self.v_pages, tables, plan.blocks, plan.masks, plan.counts):
            if values.device != device:
                raise InputError(f"all tensors must be on {device}, one is on {values.device}")
