"""Predicts the other calls of a step: K/V write, index scores, selection, verification, recurrent layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from page4.experiments.bench.prepare_case import prepare_bytes
from page4.experiments.bench.selection_case import scores_bytes, visible_scores
from page4.experiments.gated_delta_cases import delta_bytes
from page4.experiments.kernel_cases import PrepareInputs, ScoreInputs, StepShape
from page4.experiments.samples import Row
from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.prediction.cells import cell_of
from page4.experiments.sm70.prediction.columns import STEP_KERNEL_COLUMNS
from page4.experiments.sm70.prediction.config import PredictConfig, StepKernel
from page4.experiments.sm70.predictor.call import own_storages
from page4.experiments.sm70.predictor.call_digest import call_digest
from page4.experiments.sm70.predictor.static_report import dram_floor_us
from page4.experiments.sm70.predictor.step import STEP_INPUTS, predict_call
from page4.experiments.verify_cases import verify_bytes
from page4.kernels.block_select_triton import select_plan_triton
from page4.kernels.gated_delta_triton import gated_delta_triton
from page4.kernels.index_scores_triton import index_scores_triton
from page4.kernels.mtp_verify_triton import verify_triton
from page4.kernels.qsa_configs import prepare_config, scores_config
from page4.kernels.qsa_prepare_triton import qsa_prepare_triton

_PLAN_ENTRY_BYTES = 8  # a block and a mask
_MOST_BLOCKS = 1024  # all of a request's: verification goes on with what they found


def _prepare(inputs: PrepareInputs) -> object:
    config = prepare_config(inputs.q_gate, inputs.k, inputs.index, inputs.storage)
    return qsa_prepare_triton(**vars(inputs), rows_per_program=config.rows_per_program)


def _scores(inputs: ScoreInputs) -> object:
    config = scores_config(inputs.index_q, inputs.compressed_pages, inputs.groups, inputs.scores)
    return index_scores_triton(**vars(inputs), config=config)


# As the model calls them: with tuned configurations where there are some.
_LAUNCHERS: dict[StepKernel, Callable[[Any], object]] = {
    "prepare": _prepare,
    "scores": _scores,
    "select": lambda inputs: select_plan_triton(**vars(inputs)),
    "verify": lambda inputs: verify_triton(**vars(inputs)),
    "gdn": lambda inputs: gated_delta_triton(**vars(inputs)),
}


def plan_step_kernels(config: PredictConfig) -> list[tuple[StepKernel, StepShape]]:
    """Every call at every step."""
    steps = StepShape.combinations(
        config.formats[:1],
        config.rows,
        config.heads[:1],
        config.requests,
        context=config.step_context,
        overlap=config.overlap,
        head_dim=config.head_dim,
        topk=config.topk,
    )
    return [(kernel, step) for kernel in config.step_kernels for step in steps]


def step_kernel_digest(kernel: StepKernel, shape: StepShape) -> str:
    """Digest of what a call launches, as :func:`call_digest` makes it."""
    return call_digest(lambda: _LAUNCHERS[kernel](own_storages(STEP_INPUTS[kernel].without_values(shape))))


def predict_step_kernel(
    kernel: StepKernel, shape: StepShape, compiler: Compiler, config: PredictConfig
) -> Row:
    """The row of one call.

    Raises:
        InputError: the launcher refuses the step.
        CompilationError: a kernel does not compile.
        EmulationError: the emulator cannot run a kernel.
    """
    began = time.perf_counter()
    launches, _ = predict_call(
        kernel,
        shape,
        _LAUNCHERS[kernel],
        compiler,
        emulated=config.sampled_requests,
        most_replayed=config.most_replayed_requests,
        most_blocks=_MOST_BLOCKS,
        seed=config.seed,
    )
    us = sum(launch.prediction.us for launch in launches)
    longest = max((launch.prediction for launch in launches), key=lambda prediction: prediction.us)
    floor_us = dram_floor_us(floor_bytes(kernel, shape))
    return row_of(kernel, shape) | {
        "status": "predicted",
        "launches": " + ".join(f"{launch.kernel} {launch.prediction.us:.1f}" for launch in launches),
        "predicted_us": us,
        "floor_us": floor_us,
        "floor_fraction": floor_us / us,
        "bound": longest.bound,
        "registers": longest.static.registers,
        "spills": longest.static.spills,
        "blocks": longest.blocks,
        "emulated_blocks": longest.emulated_blocks,
        "seconds": time.perf_counter() - began,
    }


def floor_bytes(kernel: StepKernel, shape: StepShape) -> int:
    """Bytes that a call cannot avoid to move; of a plan, those of the blocks that all rows share at least."""
    if kernel == "prepare":
        return prepare_bytes(shape)
    if kernel == "scores":
        return scores_bytes(shape)
    if kernel == "verify":
        return verify_bytes(shape)
    if kernel == "gdn":
        return delta_bytes(shape)
    listed = min(shape.topk, shape.context // 4)
    return 4 * visible_scores(shape) + _PLAN_ENTRY_BYTES * shape.requests * listed


def row_of(kernel: StepKernel, shape: StepShape) -> Row:
    """A row without a time yet."""
    empty: Row = {name: "" if kind is str else None for name, kind in STEP_KERNEL_COLUMNS.items()}
    return empty | cell_of(shape) | {"kernel": kernel, "context": shape.context}


def step_kernel_without_time(kernel: StepKernel, shape: StepShape, status: str, reason: str) -> Row:
    """The row of a call that has none, and why."""
    return row_of(kernel, shape) | {"status": status, "launches": " ".join(reason.split())}


def key_of(kernel: StepKernel, shape: StepShape) -> tuple[Any, ...]:
    """What tells rows apart."""
    return (kernel, *cell_of(shape).values())
