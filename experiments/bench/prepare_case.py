"""Cases of the K/V write: everything between the projections of a sparse layer and its attention."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from page4.experiments.bench.case import Case, Contender, settings
from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check, sample_groups
from page4.experiments.kernel_cases import INDEX_HEADS, PrepareInputs, StepShape, prepare_copies
from page4.experiments.prepare_exact import ExactPreparation
from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.codecs import STORAGE_DTYPES
from page4.kernels.qsa_configs import prepare_config
from page4.kernels.qsa_prepare_triton import qsa_prepare_triton


def prepare_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """The launch of one step; floor: projections read (no gate), q, K, V and index keys written."""
    shape = cell.shape
    floor = prepare_bytes(shape)
    memory = shape.kv_bytes + shape.requests * shape.pages * 8 * shape.index_dim + 2 * floor
    count, cold = choose_copies(machine, floor, memory, config.max_copies)
    copies = prepare_copies(shape, machine.device, config.seed, count)
    checked = sample_groups(shape.requests, config.check_groups, config.seed)
    first = copies[0]
    q, index_q = _outputs(first)
    chosen = prepare_config(first.q_gate, first.k, first.index, first.storage)
    launches = [
        functools.partial(
            qsa_prepare_triton, **vars(inputs), q=q, index_q=index_q, rows_per_program=chosen.rows_per_program
        )
        for inputs in copies
    ]
    exact = ExactPreparation.of(copies[-1], checked)
    check = functools.partial(check_prepare, copies[-1], exact, q, index_q, launches[-1])
    return Case(floor, [Contender("triton", launches, check, settings(chosen))], count, cold)


def prepare_bytes(shape: StepShape) -> int:
    """Bytes that a launch cannot avoid: the gate, which lies between the queries, is not read."""
    per_value = STORAGE_DTYPES[shape.kv_format].itemsize
    activation = 4 if shape.kv_format == "fp32" else 2
    queries = 2 * activation * shape.query_heads * shape.head_dim
    keys_and_values = 2 * shape.kv_heads * (shape.head_dim * (activation + per_value))
    if shape.kv_format == "int8":
        keys_and_values += 8 * shape.kv_heads
    # Index queries in and out; the raw key in and, of a prompt's last rows, into the ring; a quarter key out.
    index = activation * shape.index_dim * (2 * INDEX_HEADS + 1)
    blocks_before = (shape.context - shape.rows) // BLOCK_TOKENS
    completed = shape.requests * (shape.context // BLOCK_TOKENS - blocks_before)
    ring = shape.requests * min(shape.rows, 2 * BLOCK_TOKENS)
    rows = shape.total_rows * (queries + keys_and_values + index)
    return rows + activation * shape.index_dim * (completed + ring)


def _outputs(inputs: PrepareInputs) -> tuple[Tensor, Tensor]:
    rows, heads, double = inputs.q_gate.shape
    index_dim = inputs.storage.ring.shape[2]
    index_heads = inputs.index.shape[1] // index_dim - 1
    return (
        inputs.q_gate.new_empty(rows, heads, double // 2),
        inputs.q_gate.new_empty(rows, index_heads, index_dim),
    )


def check_prepare(
    inputs: PrepareInputs,
    exact: ExactPreparation,
    q: Tensor,
    index_q: Tensor,
    launch: Callable[[], object],
) -> Check:
    """Run the inputs' launch, which writes ``q`` and ``index_q``, and compare the requests worked out.

    What is permitted is the rule of :mod:`page4.experiments.prepare_exact`.
    """
    for written in (q, index_q):
        written.fill_(torch.nan)
    launch()
    error = max(exact.shares(inputs, q, index_q).values())
    return Check(error, len(exact.requests), len(inputs.rows.block_tables))
