"""Steps that kernels are compiled for, and their inputs: shapes, dtypes and strides without values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from page4.experiments.kernel_cases import (
    DRAFT_TOKENS,
    INDEX_HEADS,
    ROTARY_DIM,
    PrepareInputs,
    ScoreInputs,
    SelectInputs,
    StepShape,
)
from page4.kernels.block_plan import BLOCK_TOKENS, MAX_GROUP_ROWS, RowGroups, plan_capacity
from page4.kernels.block_select_triton import SelectionWorkspace, empty_plan
from page4.kernels.codecs import STORAGE_DTYPES
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.qsa_prepare import PAGE_TOKENS
from page4.kernels.qsa_prepare_inputs import QSANorms, QSAStorage
from page4.kernels.step_rows import StepRows

FORMATS = ("fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8")
HEAD_DIMS = (64, 128, 256)
ROWS = range(1, MAX_GROUP_ROWS + 1)
HEADS = ((6, 1), (24, 2))  # query and KV heads: a layer's share on one of several GPUs, and a whole layer
REQUESTS = (1, 512)  # of the second, every one has a program of its own
CONTEXT = 32768

# Verification of three drafts.
USUAL = StepShape(
    requests=1, rows=4, query_heads=6, kv_heads=1, context=CONTEXT, overlap=1.0, kv_format="e4m3"
)


def step_shapes(thorough: bool) -> Iterator[StepShape]:
    """Every combination, or, not ``thorough``, those that differ from the usual step in one or two ways."""
    if thorough:
        for kv_format, head_dim, rows, (query_heads, kv_heads), requests in product(
            FORMATS, HEAD_DIMS, ROWS, HEADS, REQUESTS
        ):
            yield replace(
                USUAL, kv_format=kv_format, head_dim=head_dim, rows=rows, query_heads=query_heads,
                kv_heads=kv_heads, requests=requests,
            )  # fmt: skip
        return
    wide = replace(USUAL, query_heads=24, kv_heads=2)
    yield from dict.fromkeys(
        [
            *(replace(USUAL, kv_format=name, head_dim=dim) for name, dim in product(FORMATS, HEAD_DIMS)),
            *(replace(USUAL, rows=rows) for rows in ROWS),
            *(replace(wide, rows=rows) for rows in (1, 4, 8)),
            replace(wide, rows=8, kv_format="fp16"),
            *(replace(USUAL, requests=512, kv_format=name) for name in ("fp16", "e4m3", "int8")),
        ]
    )


def in_words(shape: StepShape) -> str:
    """A shape such as ``e4m3 D256 6/1 rows 4 x1``: heads, rows of a request, requests."""
    heads = f"{shape.query_heads}/{shape.kv_heads}"
    return f"{shape.kv_format} D{shape.head_dim} {heads} rows {shape.rows} x{shape.requests}"


def attention_inputs(shape: StepShape) -> AttentionInputs:
    """A call of grouped attention, with the gate beside the queries as the model has it."""
    groups = _groups(shape)
    both = _half(shape.total_rows, shape.query_heads, 2 * shape.head_dim)
    pages = _pages(shape)
    scales = _token_scales(shape)
    return AttentionInputs(
        q=_half(shape.total_rows, shape.query_heads, shape.head_dim),
        k_pages=pages,
        v_pages=pages,
        block_tables=_block_tables(shape),
        plan=empty_plan(groups, plan_capacity(groups.rows_per_group, shape.topk, shape.max_blocks)),
        rows_per_group=groups.rows_per_group,
        kv_format=shape.kv_format,
        k_scale=1.0,
        v_scale=1.0,
        softmax_scale=shape.head_dim**-0.5,
        gate=both[..., shape.head_dim :],
        k_token_scales=scales,
        v_token_scales=scales,
    )


def score_inputs(shape: StepShape) -> ScoreInputs:
    """A call of index scores."""
    return ScoreInputs(
        index_q=_half(shape.total_rows, INDEX_HEADS, shape.index_dim),
        compressed_pages=_compressed(shape),
        block_tables=_block_tables(shape),
        positions=_positions(shape),
        groups=_groups(shape),
        scores=torch.empty(shape.total_rows, shape.max_blocks),
    )


def select_inputs(shape: StepShape) -> SelectInputs:
    """A call of selection and plan."""
    groups = _groups(shape)
    return SelectInputs(
        scores=torch.empty(shape.total_rows, shape.max_blocks),
        positions=_positions(shape),
        groups=groups,
        workspace=SelectionWorkspace.allocate(shape.total_rows, shape.max_blocks, shape.topk),
        plan=empty_plan(groups, plan_capacity(groups.rows_per_group, shape.topk, shape.max_blocks)),
    )


def prepare_inputs(shape: StepShape) -> PrepareInputs:
    """A call of the step between projections and attention."""
    rows, dim, index_dim = shape.total_rows, shape.head_dim, shape.index_dim
    pages, scales = _pages(shape), _token_scales(shape)
    ring_rows = BLOCK_TOKENS * -(-(BLOCK_TOKENS + DRAFT_TOKENS) // BLOCK_TOKENS)
    storage = QSAStorage(
        kv_format=shape.kv_format,
        k_pages=pages,
        v_pages=pages,
        ring=_half(shape.requests, ring_rows, index_dim),
        compressed_pages=_compressed(shape),
        k_scale_pages=scales,
        v_scale_pages=scales,
    )
    positions, count = _positions(shape), torch.empty(rows, dtype=torch.int32)
    return PrepareInputs(
        q_gate=_half(rows, shape.query_heads, 2 * dim),
        k=_half(rows, shape.kv_heads, dim),
        v=_half(rows, shape.kv_heads, dim),
        index=_half(rows, (INDEX_HEADS + 1) * index_dim),
        norms=QSANorms(*(_half(size) for size in (dim, dim, index_dim, index_dim))),
        angles=torch.empty(shape.context, min(ROTARY_DIM, dim, index_dim)),
        rows=StepRows(positions, count, count, count, positions, _block_tables(shape)),
        storage=storage,
    )


def _half(*size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float16)


def _groups(shape: StepShape) -> RowGroups:
    return RowGroups.of([shape.rows] * shape.requests, shape.rows_per_group)


def _positions(shape: StepShape) -> Tensor:
    return torch.empty(shape.total_rows, dtype=torch.int64)


def _block_tables(shape: StepShape) -> Tensor:
    return torch.empty(shape.requests, shape.pages, dtype=torch.int64)


def _pages(shape: StepShape) -> Tensor:
    size = (1, shape.kv_heads, PAGE_TOKENS, shape.head_dim)
    return torch.empty(size, dtype=STORAGE_DTYPES[shape.kv_format])


def _compressed(shape: StepShape) -> Tensor:
    return _half(1, PAGE_TOKENS // BLOCK_TOKENS, shape.index_dim)


def _token_scales(shape: StepShape) -> Tensor | None:
    return torch.empty(1, shape.kv_heads, PAGE_TOKENS) if shape.kv_format == "int8" else None
