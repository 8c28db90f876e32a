"""Cases of index scores, and of selection and plan."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from page4.experiments.bench.attention_case import same_plan
from page4.experiments.bench.case import Case, Contender, settings
from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.reference import Check, sample_groups, worst
from page4.experiments.kernel_cases import (
    INDEX_HEADS,
    ScoreInputs,
    SelectInputs,
    StepShape,
    score_copies,
    select_copies,
)
from page4.kernels.block_plan import BLOCK_TOKENS, PackedPlan, RowGroups, pack_plan
from page4.kernels.block_select import select_blocks, union_plan
from page4.kernels.block_select_triton import select_plan_triton
from page4.kernels.index_scores_triton import index_scores_triton
from page4.kernels.qsa_configs import scores_config

_PLAN_ENTRY = 8  # bytes: a block and a mask


def scores_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """Index scores of every complete block; floor: keys once per request, queries, and scores written."""
    shape = cell.shape
    floor = scores_bytes(shape)
    memory = shape.requests * shape.pages * 8 * shape.index_dim + 4 * shape.total_rows * shape.max_blocks
    count, cold = choose_copies(machine, floor, memory, config.max_copies)
    copies = score_copies(shape, machine.device, config.seed, count)
    checked = sample_groups(len(copies[-1].groups.rows), config.check_groups, config.seed)
    first = copies[0]
    chosen = scores_config(first.index_q, first.compressed_pages, first.groups, first.scores)
    launches = [functools.partial(index_scores_triton, **vars(inputs), config=chosen) for inputs in copies]
    check = functools.partial(check_scores, copies[-1], checked, launches[-1])
    return Case(floor, [Contender("triton", launches, check, settings(chosen))], count, cold)


def select_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """Exact top-k and the union plan; floor: visible scores read and the plan written."""
    shape = cell.shape
    memory = 3 * 4 * shape.total_rows * shape.max_blocks
    count, cold = choose_copies(machine, 4 * visible_scores(shape), memory, config.max_copies)
    copies = select_copies(shape, machine.device, config.seed, count)
    checked = sample_groups(len(copies[-1].groups.rows), config.check_groups, config.seed)
    launches = [functools.partial(select_plan_triton, *vars(inputs).values()) for inputs in copies]
    launches[0]()
    floor = 4 * visible_scores(shape) + _PLAN_ENTRY * int(copies[0].plan.counts.sum())
    check = functools.partial(check_selection, copies[-1], checked, launches[-1])
    return Case(floor, [Contender("triton", launches, check)], count, cold)


def scores_bytes(shape: StepShape) -> int:
    """Bytes that index scores cannot avoid: each request's keys, queries, scores of complete blocks."""
    keys = shape.requests * (shape.context // BLOCK_TOKENS) * 2 * shape.index_dim
    queries = 2 * shape.total_rows * INDEX_HEADS * shape.index_dim
    return keys + queries + 4 * visible_scores(shape)


def visible_scores(shape: StepShape) -> int:
    """Scores of complete blocks, over all rows."""
    positions = range(shape.context - shape.rows, shape.context)
    return shape.requests * sum((position + 1) // BLOCK_TOKENS for position in positions)


def check_scores(inputs: ScoreInputs, checked: list[int], launch: Callable[[], object]) -> Check:
    """Run the inputs' launch and compare all scores of the chosen groups with float64.

    Permitted: FP32 sums of ``Di`` products and ``Hi`` heads, in any order.
    """
    inputs.scores.fill_(torch.nan)
    launch()
    groups, error = inputs.groups, 0.0
    dim, per_page = inputs.index_q.shape[2], inputs.compressed_pages.shape[1]
    for group in checked:
        start, size = int(groups.start[group]), int(groups.rows[group])
        rows = slice(start, start + size)
        pages = inputs.block_tables[int(groups.request[group])]
        keys = inputs.compressed_pages[pages].double().view(-1, dim)  # [NB, Di] in block order
        queries = inputs.index_q[rows].double()  # [M, Hi, Di]
        expected = (queries @ keys.T).relu().sum(1) * dim**-0.5
        magnitude = (queries.abs() @ keys.abs().T).sum(1) * dim**-0.5
        visible = (inputs.positions[rows] + 1) // BLOCK_TOKENS
        complete = torch.arange(len(pages) * per_page, device=keys.device) < visible[:, None]
        columns = inputs.scores.shape[1]
        bound = (dim + queries.shape[1]) * 2.0**-23 * magnitude
        m = complete[:, :columns]
        error = max(error, worst(inputs.scores[rows][m], expected[:, :columns][m], bound[:, :columns][m]))
    return Check(error, len(checked), len(groups.rows))


def check_selection(inputs: SelectInputs, checked: list[int], launch: Callable[[], object]) -> Check:
    """Run the inputs' launch and compare the plans of the chosen groups with the reference, bit for bit."""
    inputs.plan.counts.fill_(-1)
    launch()
    plan, groups, error = inputs.plan, inputs.groups, 0.0
    for group in checked:
        start, size = int(groups.start[group]), int(groups.rows[group])
        rows = slice(start, start + size)
        positions = inputs.positions[rows]
        visible = (positions + 1) // BLOCK_TOKENS
        scores = inputs.scores[rows].nan_to_num(0.0)
        selected = select_blocks(scores, visible.clamp(max=scores.shape[1]), inputs.workspace.topk)
        expected = pack_plan(union_plan(selected, positions, size), size, capacity=plan.blocks.shape[1])
        if not same_plan(_group_of(plan, groups, group), expected):
            error = float("inf")
    return Check(error, len(checked), len(groups.rows))


def _group_of(plan: PackedPlan, groups: RowGroups, group: int) -> PackedPlan:
    one = slice(group, group + 1)
    return PackedPlan(
        plan.blocks[one], plan.counts[one], plan.masks[one],
        groups.request[one], groups.start[one], groups.rows[one],
    )  # fmt: skip
