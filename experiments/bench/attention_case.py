"""Cases of grouped attention: alone (`page4_attention`, `prefill`) or planned (`planned_attention`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from page4.experiments.bench.baseline import GatherAttention
from page4.experiments.bench.case import Case, Contender, settings
from page4.experiments.bench.cells import Cell
from page4.experiments.bench.config import AttentionImplementation, BenchConfig
from page4.experiments.bench.copies import choose_copies
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.peer import PeerAttention, load_peer
from page4.experiments.bench.reference import Check, attention_groups, sample_groups
from page4.experiments.kernel_cases import (
    SelectInputs,
    StepShape,
    attention_copies,
    select_copies,
    unique_bytes,
)
from page4.kernels.block_plan import BLOCK_TOKENS, PackedPlan
from page4.kernels.block_select_triton import (
    plan_selected_triton,
    select_plan_triton,
)
from page4.kernels.codecs import STORAGE_DTYPES
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_dispatch import chosen, page4_attention
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import Partials

_FP16, _BF16 = 2.0**-11, 2.0**-8  # relative errors of one rounding


def attention_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """Attention and merge over plans that exist already."""
    copies, cold = _copies(cell.shape, config, machine)
    return _case(copies, cold, config, [name for name in config.implementations if name != "scan"])


def planned_case(cell: Cell, config: BenchConfig, machine: Machine) -> Case:
    """Plan, attention and merge: a step from what its rows selected, as the goals count it."""
    copies, cold = _copies(cell.shape, config, machine)
    plans = _plan_inputs(cell.shape, config, machine, len(copies))
    # The other implementations read no plan.
    own = [name for name in config.implementations if name in ("gluon", "triton")]
    return _case(copies, cold, config, own, plans)


def _case(
    copies: list[AttentionInputs],
    cold: bool,
    config: BenchConfig,
    names: Sequence[AttentionImplementation],
    plans: list[SelectInputs] | None = None,
) -> Case:
    contenders: list[Contender] = []
    absent: dict[str, str] = {}
    checked = sample_groups(copies[-1].groups, config.check_groups, config.seed)
    for name in names:
        made = _contender(name, copies, checked, config, plans)
        if isinstance(made, str):
            absent[name] = made
        else:
            contenders.append(made)
    return Case(unique_bytes(copies[0]), contenders, len(copies), cold, absent)


def _copies(shape: StepShape, config: BenchConfig, machine: Machine) -> tuple[list[AttentionInputs], bool]:
    queries = 8 * shape.total_rows * shape.query_heads * shape.head_dim  # q, out and a strided gate, FP16
    # As the floor counts: blocks of one group times the groups, but no more than there are.
    shared = round(shape.overlap * shape.topk)
    listed = min(shape.max_blocks, shared + shape.rows_per_group * (shape.topk - shared))
    groups = -(-shape.rows // shape.rows_per_group)
    tokens = min(shape.context, groups * listed * BLOCK_TOKENS)
    per_token = 2 * shape.kv_heads * shape.head_dim * STORAGE_DTYPES[shape.kv_format].itemsize
    bytes_per_launch = shape.requests * tokens * per_token + queries
    # Making the pages takes some more; its parts are freed one by one.
    memory = shape.kv_bytes + queries
    count, cold = choose_copies(machine, bytes_per_launch, memory, config.max_copies)
    return attention_copies(shape, machine.device, config.seed, count), cold


def _contender(
    name: AttentionImplementation,
    copies: list[AttentionInputs],
    checked: list[int],
    config: BenchConfig,
    plans: list[SelectInputs] | None,
) -> Contender | str:
    """One implementation on the copies, or why it cannot run."""
    if name == "pytorch":
        if bool((copies[0].plan.group_rows < copies[0].rows_per_group).any()):
            return "it takes full groups of rows"
        calls = [GatherAttention(inputs) for inputs in copies]
        return Contender(name, calls, functools.partial(_check_baseline, calls[-1], checked), "", False)
    if name == "vllm":
        return _peer(copies, checked, config.topk)
    return _own(name, copies, checked, plans)


def _own(
    name: Literal["gluon", "triton"],
    copies: list[AttentionInputs],
    checked: list[int],
    plans: list[SelectInputs] | None,
) -> Contender | str:
    try:
        choice = chosen(copies[0], name)
    except InputError as error:
        return str(error)
    splits = choice.config.splits
    # As in the model, one workspace and one output serve all launches.
    partials = Partials.empty(copies[0], splits) if splits > 1 else None
    out, lse = copies[0].outputs(None, None)
    calls: list[Callable[[], Any]] = []
    for index, inputs in enumerate(copies):
        attend = functools.partial(page4_attention, implementation=name, partials=partials, out=out, lse=lse)
        if plans is None:
            calls.append(functools.partial(attend, inputs))
        else:
            calls.append(functools.partial(_step, attend, inputs, plans[index]))
    is_chosen = chosen(copies[0], "auto").implementation == name
    planned = None if plans is None else plans[-1].plan
    check = functools.partial(_check_own, calls[-1], copies[-1], planned, checked)
    return Contender(name, calls, check, f"{settings(choice.config)} ({choice.source})", is_chosen)


def _step(
    attend: Callable[..., tuple[Tensor, Tensor]], inputs: AttentionInputs, planned: SelectInputs
) -> tuple[Tensor, Tensor]:
    plan_selected_triton(planned.positions, planned.groups, planned.workspace, planned.plan)
    return attend(dataclasses.replace(inputs, plan=planned.plan))


def _plan_inputs(shape: StepShape, config: BenchConfig, machine: Machine, count: int) -> list[SelectInputs]:
    """For every copy, the bitmaps that selection leaves behind and a plan to be written."""
    (first,) = select_copies(shape, machine.device, config.seed)
    select_plan_triton(*vars(first).values())
    plans = []
    for _ in range(count):
        workspace = dataclasses.replace(first.workspace, bits=first.workspace.bits.clone())
        plan = PackedPlan(**{name: values.clone() for name, values in vars(first.plan).items()})
        plan.counts.fill_(-1)  # what the launch does not write is seen
        plans.append(dataclasses.replace(first, workspace=workspace, plan=plan))
    return plans


def _check_own(
    call: Callable[[], tuple[Tensor, Tensor]],
    inputs: AttentionInputs,
    planned: PackedPlan | None,
    checked: list[int],
) -> Check:
    out, lse = call()
    error = 0.0
    if planned is not None and not same_plan(planned, inputs.plan):
        error = float("inf")
    roundings = 3 * _FP16 if out.dtype == torch.float16 else 0.0
    for group in attention_groups(inputs, checked):
        error = max(error, group.error(out, lse, roundings))
    return Check(error, len(checked), inputs.groups)


def _check_baseline(call: GatherAttention, checked: list[int]) -> Check:
    out, inputs = call(), call.inputs
    half = out.dtype == torch.float16
    # The output is rounded before the gate too. SDPA may round scaled queries and keys, int8 keys are.
    roundings, scores = (5 * _FP16, 2 * _FP16) if half else (0.0, 0.0)
    error = 0.0
    for group in attention_groups(inputs, checked):
        error = max(error, group.error(out, None, roundings, scores))
    return Check(error, len(checked), inputs.groups)


def _peer(copies: list[AttentionInputs], checked: list[int], topk: int) -> Contender | str:
    launcher = load_peer()
    if isinstance(launcher, str):
        return launcher
    if copies[0].kv_format != "e4m3":
        return f"it reads e4m3, not {copies[0].kv_format}"
    calls = [PeerAttention(inputs, launcher, topk) for inputs in copies]

    def check() -> Check:
        call, inputs = calls[-1], copies[-1]
        out = call()
        error = 0.0
        for group in attention_groups(inputs, checked, call.q, call.gate):
            error = max(error, group.error(out, None, 4 * _BF16))
        return Check(error, len(checked), inputs.groups)

    return Contender("vllm", calls, check, "bfloat16 queries", False)


def same_plan(actual: PackedPlan, expected: PackedPlan) -> bool:
    """Whether two plans of the same groups list the same blocks with the same masks, bit for bit."""
    if not torch.equal(actual.counts, expected.counts):
        return False
    listed = torch.arange(actual.blocks.shape[1], device=actual.blocks.device) < expected.counts[:, None]
    return all(
        torch.equal(a[:, : listed.shape[1]][listed], e[:, : listed.shape[1]][listed])
        for a, e in ((actual.blocks, expected.blocks), (actual.masks, expected.masks))
    )
