"""Which shapes the bench measures."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from page4.experiments.bench.config import BenchConfig, Kernel
from page4.experiments.kernel_cases import StepShape

PREPARE_CONTEXT = 4096  # its length does not matter to the K/V write of a decoding step

GOAL_SHAPES = ((1, 1, 6, 1), (1, 4, 6, 1), (4, 4, 24, 2), (16, 4, 24, 2), (64, 4, 6, 1), (64, 4, 24, 2))
"""Requests, rows, query and KV heads of the steps that have goals."""
GOAL_CONTEXT, GOAL_OVERLAP, GOAL_FORMATS = 32768, 0.9, ("e4m3", "fp16")
PREFILL_HEADS = (24, 2)
PREFILL_STEP = 2048  # prompt tokens that the model takes in one step

# What a kernel's work depends on; the other columns of its rows are empty.
_DEPENDS = {
    "qsa_prepare": ("requests", "rows", "query_heads", "kv_heads", "kv_format"),
    "index_scores": ("requests", "rows", "context"),
    "block_select": ("requests", "rows", "context", "overlap"),
    "gated_delta": ("requests", "rows"),
    "gated_delta_prefill": ("requests", "rows"),
    "mtp_verify": ("requests", "rows"),
    "mtp_verify_sampled": ("requests", "rows"),
    "mtp_verify_filtered": ("requests", "rows"),
}
SHAPE_COLUMNS = {
    "requests": int,
    "rows": int,
    "query_heads": int,
    "kv_heads": int,
    "context": int,
    "overlap": float,
    "kv_format": str,
}


@dataclass(frozen=True)
class Cell:
    """A kernel at a shape."""

    kernel: Kernel
    shape: StepShape

    @property
    def columns(self) -> dict[str, Any]:
        """The shape as columns of a row; empty where the kernel's work does not depend on it."""
        used = _DEPENDS.get(self.kernel, tuple(SHAPE_COLUMNS))
        columns: dict[str, Any] = {
            name: getattr(self.shape, name) if name in used else ("" if kind is str else None)
            for name, kind in SHAPE_COLUMNS.items()
        }
        return {"kernel": self.kernel, **columns}

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells cells apart."""
        return tuple(self.columns.values())

    @property
    def label(self) -> str:
        """The cell in words, for progress and tables."""
        return f"{self.kernel} {shape_label(self.columns)}"


def shape_label(columns: Mapping[str, Any]) -> str:
    """A shape's columns in words, such as ``64 x 4, 24/2, 32k, 0.9, e4m3``."""
    parts = [f"{columns['requests']} x {columns['rows']}"]
    if columns["query_heads"]:
        parts.append(f"{columns['query_heads']}/{columns['kv_heads']}")
    if columns["context"]:
        context = columns["context"]
        parts.append(f"{context / 1024:.3g}k" if context >= 1024 else str(context))
    if columns["overlap"] is not None:
        parts.append(f"{columns['overlap']:g}")
    if columns["kv_format"]:
        parts.append(columns["kv_format"])
    return ", ".join(parts)


def plan_cells(config: BenchConfig) -> list[Cell]:
    """Every cell once: those with goals of all kernels, then the sweeps, kernel after kernel."""
    cells: dict[tuple[Any, ...], Cell] = {}
    for kernel in config.kernels if config.bars else ():
        cells |= {cell.key: cell for cell in _goal_cells(config, kernel)}
    for kernel in config.kernels:
        for cell in _sweep_cells(config, kernel):
            cells.setdefault(cell.key, cell)
    return list(cells.values())


def _shape(config: BenchConfig, **values: Any) -> StepShape:
    return StepShape(**values, head_dim=config.head_dim, topk=config.topk)


def _goal_cells(config: BenchConfig, kernel: Kernel) -> Iterator[Cell]:
    common: dict[str, Any] = {"context": GOAL_CONTEXT, "overlap": GOAL_OVERLAP, "kv_format": GOAL_FORMATS[0]}
    large = {"query_heads": PREFILL_HEADS[0], "kv_heads": PREFILL_HEADS[1]}
    if kernel in ("page4_attention", "planned_attention"):
        for (requests, rows, query_heads, kv_heads), kv_format in itertools.product(
            GOAL_SHAPES, GOAL_FORMATS
        ):
            values = common | {"requests": requests, "rows": rows, "kv_format": kv_format}
            yield Cell(kernel, _shape(config, **values, query_heads=query_heads, kv_heads=kv_heads))
    elif kernel == "prefill":
        for length, kv_format in itertools.product((8192, 32768), GOAL_FORMATS):
            yield Cell(kernel, prompt(config, length, PREFILL_HEADS, kv_format))
    elif kernel == "gated_delta_prefill":
        for length in (PREFILL_STEP, 8192, 32768):
            yield Cell(kernel, prompt(config, length, PREFILL_HEADS, GOAL_FORMATS[0]))
    elif kernel == "qsa_prepare":
        for kv_format in GOAL_FORMATS:
            yield Cell(kernel, prompt(config, 8192, PREFILL_HEADS, kv_format))
    elif kernel == "index_scores":
        yield Cell(kernel, _shape(config, **common | large | {"requests": 64, "rows": 4, "context": 262144}))
    elif kernel in ("gated_delta", "mtp_verify", "mtp_verify_sampled", "mtp_verify_filtered"):
        for requests in (1, 64):
            yield Cell(kernel, _shape(config, **common | large | {"requests": requests, "rows": 4}))
    elif kernel == "block_select":
        for context in (32768, 262144):
            values = common | large | {"requests": 1, "rows": 4, "context": context}
            yield Cell(kernel, _shape(config, **values))


def prompt(config: BenchConfig, length: int, heads: tuple[int, int], kv_format: str) -> StepShape:
    """A whole prompt of one request as one step."""
    return _shape(
        config, requests=1, rows=length, query_heads=heads[0], kv_heads=heads[1],
        context=length, overlap=GOAL_OVERLAP, kv_format=kv_format,
    )  # fmt: skip


def _sweep_cells(config: BenchConfig, kernel: Kernel) -> Iterator[Cell]:
    if config.sweep == "none":
        return
    lengths = {
        "prefill": config.prefill_lengths,
        "gated_delta_prefill": config.prefill_lengths,
        "qsa_prepare": config.prepare_rows,
    }.get(kernel, ())
    if config.formats and lengths:
        for length, heads, kv_format in _combine(config.sweep, lengths, config.heads, config.formats):
            yield Cell(kernel, prompt(config, length, heads, kv_format))
    if kernel in ("prefill", "gated_delta_prefill"):
        return
    # In the order of importance: a prompt's context is its length, a write has no context.
    contexts = (max(PREPARE_CONTEXT, *config.rows),) if kernel == "qsa_prepare" else config.contexts
    axes = (config.requests, config.rows, config.heads, contexts, config.overlaps, config.formats)
    for requests, rows, heads, context, overlap, kv_format in _combine(config.sweep, *axes):
        shape = _shape(
            config, requests=requests, rows=rows, query_heads=heads[0], kv_heads=heads[1],
            context=context, overlap=overlap, kv_format=kv_format,
        )  # fmt: skip
        cell = Cell(kernel, shape)
        yield dataclasses.replace(cell, shape=_canonical(config, cell))


def _canonical(config: BenchConfig, cell: Cell) -> StepShape:
    """The shape with the centre's value wherever the kernel does not care."""
    used = _DEPENDS.get(cell.kernel, tuple(SHAPE_COLUMNS))
    centre: dict[str, Any] = {
        "query_heads": config.heads[0][0],
        "kv_heads": config.heads[0][1],
        "overlap": config.overlaps[0],
        "kv_format": config.formats[0],
    }
    return dataclasses.replace(
        cell.shape, **{name: value for name, value in centre.items() if name not in used}
    )


def _combine(sweep: str, *axes: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """All combinations, or the first values and every change of a single one."""
    if sweep == "product":
        yield from itertools.product(*axes)
        return
    centre = tuple(axis[0] for axis in axes)
    yield centre
    for index, axis in enumerate(axes):
        for value in axis[1:]:
            yield (*centre[:index], value, *centre[index + 1 :])
