"""Compilation of all kernels of a bench before anything is timed, several at once.

A kernel is compiled by its first launch. What it becomes depends on the shapes of its arguments and not on
what they hold, so each is launched here on hollow inputs: padding rows alone, and a cache of one page.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from triton.errors import TritonError

from page4.experiments.bench.cells import PREFILL_STEP, Cell
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.gated_delta_case import delta_forms
from page4.experiments.bench.verify_case import CHOICES
from page4.experiments.gated_delta_cases import delta_inputs, prompt_inputs
from page4.experiments.kernel_cases import (
    DRAFT_TOKENS,
    INDEX_HEADS,
    ROTARY_DIM,
    StepShape,
    static_scale,
)
from page4.experiments.progress import Reporter
from page4.experiments.verify_cases import Choice, verify_inputs
from page4.kernels.block_plan import BLOCK_TOKENS, RowGroups, plan_capacity
from page4.kernels.block_select_triton import SelectionWorkspace, empty_plan, select_plan_triton
from page4.kernels.codecs import STORAGE_DTYPES
from page4.kernels.errors import InputError
from page4.kernels.gated_delta_dispatch import PrefillForm, prefill_gated_delta
from page4.kernels.gated_delta_triton import gated_delta_triton
from page4.kernels.index_scores_triton import index_scores_triton
from page4.kernels.mtp_verify_triton import verify_triton
from page4.kernels.page4_attention_dispatch import chosen, page4_attention
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.qsa_configs import prepare_config, scores_config
from page4.kernels.qsa_prepare import PAGE_TOKENS
from page4.kernels.qsa_prepare_inputs import QSANorms, QSAStorage
from page4.kernels.qsa_prepare_triton import qsa_prepare_triton
from page4.kernels.step_rows import StepRows

_MOST_WORKERS = 16

FAILURES = (TritonError, RuntimeError, InputError)
"""What kernels raise that do not compile, need too much of the GPU, or refuse their configuration."""

Task = Callable[[], object]


def compile_tasks(cells: Iterable[Cell], config: BenchConfig, device: torch.device) -> dict[Any, Task]:
    """One launch for every kernel that the cells need, by what tells the kernels apart."""
    tasks: dict[Any, Task] = {}
    for cell in cells:
        shape = cell.shape
        if cell.kernel == "qsa_prepare":
            key: Any = (cell.kernel, shape.query_heads, shape.kv_heads, shape.kv_format, shape.total_rows)
            tasks.setdefault(key, functools.partial(_prepare, shape, device))
        elif cell.kernel == "index_scores":
            key = (cell.kernel, shape.rows, shape.requests, shape.max_blocks)
            tasks.setdefault(key, functools.partial(_scores, shape, device))
        elif cell.kernel == "gated_delta":
            tasks.setdefault((cell.kernel, shape.rows), functools.partial(_gated_delta, shape, device))
        elif cell.kernel == "gated_delta_prefill":
            for form in delta_forms(config, device).values():
                tasks.setdefault((cell.kernel, form), functools.partial(_delta_prompt, device, form))
        elif cell.kernel in CHOICES:
            key = (cell.kernel, shape.rows, min(shape.requests, 2))  # strides of one request are special
            tasks.setdefault(key, functools.partial(_verify, shape, device, CHOICES[cell.kernel]))
        elif cell.kernel == "block_select":
            key = (cell.kernel, shape.rows, shape.max_blocks)
            tasks.setdefault(key, functools.partial(_select, shape, device))
        else:
            tasks |= {k: t for k, t in _attention_tasks(shape, config, device).items() if k not in tasks}
    return tasks


def run_tasks(tasks: Iterable[Task], device: torch.device, progress: Reporter) -> None:
    """Run the tasks, in as many threads as there are processors on a GPU, and report each.

    Most of a compilation is spent outside Python. A kernel that does not compile is reported by its cell.
    """
    # The interpreter, which stands in for a GPU in tests, is not made for threads.
    workers = min(_MOST_WORKERS, os.cpu_count() or 1) if device.type == "cuda" else 1
    with ThreadPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(task) for task in tasks]):
            error = future.exception()
            if error is not None and not isinstance(error, FAILURES):
                raise error
            progress.advance("compiled")


def _attention_tasks(shape: StepShape, config: BenchConfig, device: torch.device) -> dict[Any, Task]:
    inputs = hollow_attention(shape, device)
    tasks: dict[Any, Task] = {}
    for name in config.implementations:
        if name not in ("gluon", "triton"):
            continue
        try:
            choice = chosen(inputs, name)
        except InputError:
            continue  # its cell says why it cannot run
        heads = (shape.query_heads, shape.kv_heads, shape.head_dim)
        key = (name, choice.config, heads, shape.rows_per_group, inputs.plan.blocks.shape[1], shape.kv_format)
        tasks[key] = functools.partial(_attend, shape, device, name)
    return tasks


def _attend(shape: StepShape, device: torch.device, name: Any) -> None:
    page4_attention(hollow_attention(shape, device), name)


def _padding(shape: StepShape, device: torch.device) -> RowGroups:
    """As many groups as the shape has, none of them with rows."""
    groups = shape.requests * -(-shape.rows // shape.rows_per_group)
    return RowGroups.of([], shape.rows_per_group, groups=groups, device=device)


def hollow_attention(shape: StepShape, device: torch.device) -> AttentionInputs:
    """Inputs that look like those of the shape to a compiler, without its cache."""
    groups = _padding(shape, device)
    plan = empty_plan(groups, plan_capacity(shape.rows_per_group, shape.topk, shape.max_blocks))
    plan.counts.zero_()
    page = (1, shape.kv_heads, PAGE_TOKENS)
    pages = torch.zeros(*page, shape.head_dim, dtype=STORAGE_DTYPES[shape.kv_format], device=device)
    int8 = shape.kv_format == "int8"
    scales = torch.ones(page, device=device) if int8 else None
    dtype = torch.float32 if shape.kv_format == "fp32" else torch.float16
    rows = (shape.total_rows, shape.query_heads)
    q = torch.empty(*rows, shape.head_dim, dtype=dtype, device=device)
    gate = torch.empty(*rows, 2 * shape.head_dim, dtype=dtype, device=device)[..., shape.head_dim :]
    return AttentionInputs(
        q=q,
        k_pages=pages,
        v_pages=pages,
        block_tables=torch.zeros(shape.requests, shape.pages, dtype=torch.int64, device=device),
        plan=plan,
        rows_per_group=shape.rows_per_group,
        kv_format=shape.kv_format,
        k_scale=static_scale(shape.kv_format),
        v_scale=static_scale(shape.kv_format),
        softmax_scale=shape.head_dim**-0.5,
        gate=gate,
        k_token_scales=scales,
        v_token_scales=scales,
    )


def _scores(shape: StepShape, device: torch.device) -> None:
    rows = shape.total_rows
    index_q = torch.zeros(rows, INDEX_HEADS, shape.index_dim, dtype=torch.float16, device=device)
    per_page = PAGE_TOKENS // BLOCK_TOKENS
    keys = torch.zeros(1, per_page, shape.index_dim, dtype=torch.float16, device=device)
    tables = torch.zeros(shape.requests, shape.pages, dtype=torch.int64, device=device)
    positions, groups = torch.full((rows,), -1, device=device), _padding(shape, device)
    scores = torch.empty(rows, shape.max_blocks, device=device)
    config = scores_config(index_q, keys, groups, scores)
    index_scores_triton(index_q, keys, tables, positions, groups, scores, config)


def _gated_delta(shape: StepShape, device: torch.device) -> None:
    inputs = delta_inputs(dataclasses.replace(shape, requests=1), device)
    inputs.rows.requests.fill_(-1)
    gated_delta_triton(**vars(inputs))


def _delta_prompt(device: torch.device, form: PrefillForm) -> None:
    inputs = prompt_inputs(1, PREFILL_STEP, device)
    inputs.rows.requests.fill_(-1)
    prefill_gated_delta(**vars(inputs), form=form)


def _verify(shape: StepShape, device: torch.device, choice: Choice) -> None:
    inputs = verify_inputs(dataclasses.replace(shape, requests=min(shape.requests, 2)), device, choice)
    inputs.positions.fill_(-1)
    verify_triton(**vars(inputs))


def _select(shape: StepShape, device: torch.device) -> None:
    rows = shape.total_rows
    select_plan_triton(
        torch.empty(rows, shape.max_blocks, device=device),
        torch.full((rows,), -1, device=device),
        _padding(shape, device),
        SelectionWorkspace.allocate(rows, shape.max_blocks, shape.topk, device),
    )


def _prepare(shape: StepShape, device: torch.device) -> None:
    rows, dim, index_dim = shape.total_rows, shape.head_dim, shape.index_dim
    dtype = torch.float32 if shape.kv_format == "fp32" else torch.float16

    def zeros(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    page = (1, shape.kv_heads, PAGE_TOKENS)
    storage_dtype = STORAGE_DTYPES[shape.kv_format]
    scale = static_scale(shape.kv_format)
    scales = torch.ones(page, device=device) if shape.kv_format == "int8" else None
    ring_rows = BLOCK_TOKENS * -(-(BLOCK_TOKENS + DRAFT_TOKENS) // BLOCK_TOKENS)
    tables = zeros(shape.requests, shape.pages, dtype=torch.int64)
    storage = QSAStorage(
        shape.kv_format,
        zeros(*page, dim, dtype=storage_dtype),
        zeros(*page, dim, dtype=storage_dtype),
        zeros(shape.requests, ring_rows, index_dim),
        zeros(1, PAGE_TOKENS // BLOCK_TOKENS, index_dim),
        scale,
        scale,
        scales,
        scales,
    )
    q_gate, k = zeros(rows, shape.query_heads, 2 * dim), zeros(rows, shape.kv_heads, dim)
    index = zeros(rows, (INDEX_HEADS + 1) * index_dim)
    qsa_prepare_triton(
        q_gate,
        k,
        k,
        index,
        QSANorms(zeros(dim), zeros(dim), zeros(index_dim), zeros(index_dim)),
        zeros(shape.context, min(ROTARY_DIM, dim, index_dim), dtype=torch.float32),
        StepRows.of([], [], tables, rows=rows),
        storage,
        rows_per_program=prepare_config(q_gate, k, index, storage).rows_per_program,
    )
