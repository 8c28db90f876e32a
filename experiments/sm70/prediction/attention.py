"""Predicts the attention and merge of one step, by one implementation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from page4.experiments.kernel_cases import StepShape, unique_bytes
from page4.experiments.sm70.compiling import CompilationError, Compiler
from page4.experiments.sm70.emulator import EmulationError
from page4.experiments.sm70.prediction.config import Implementation, PredictConfig
from page4.experiments.sm70.predictor.call import KernelPrediction, own_storages
from page4.experiments.sm70.predictor.call_digest import call_digest
from page4.experiments.sm70.predictor.step import STEP_INPUTS, predict_call
from page4.kernels.page4_attention_dispatch import Choice, chosen, page4_attention
from page4.kernels.page4_attention_inputs import AttentionInputs

FAILURES = (CompilationError, EmulationError)
"""What a kernel can do instead of having a time."""


@dataclass(frozen=True)
class StepPrediction:
    """A step's attention.

    Attributes:
        choice: implementation and configuration as on a V100.
        kernels: attention, and the merge where there are splits.
        floor_bytes: that no implementation can avoid to move.
        seconds: that it took to predict.
    """

    choice: Choice
    kernels: Sequence[KernelPrediction]
    floor_bytes: int
    seconds: float

    @property
    def us(self) -> float:
        """Microseconds of all kernels, without what passes between them."""
        return sum(kernel.prediction.us for kernel in self.kernels)


def attention_digest(shape: StepShape, implementation: Implementation) -> str:
    """Digest of what a step launches, as :func:`call_digest` makes it."""
    return call_digest(
        lambda: page4_attention(own_storages(STEP_INPUTS["attention"].without_values(shape)), implementation)
    )


def predict_attention(
    shape: StepShape, implementation: Implementation, compiler: Compiler, config: PredictConfig
) -> StepPrediction:
    """Predict a step of equal requests.

    Args:
        shape: of the step.
        implementation: of attention.
        compiler: for the V100.
        config: says how much is emulated and replayed, and seeds the inputs.

    Raises:
        InputError: the implementation cannot run the step on a V100.
        CompilationError: a kernel does not compile.
        EmulationError: the emulator cannot run a kernel.
    """
    began = time.perf_counter()
    choices: list[Choice] = []

    def call(inputs: AttentionInputs) -> None:
        choices.append(chosen(inputs, implementation))
        page4_attention(inputs, implementation)

    kernels, data = predict_call(
        "attention",
        shape,
        call,
        compiler,
        emulated=config.sampled_requests,
        most_replayed=config.most_replayed_requests,
        most_blocks=config.plain_blocks if implementation == "triton" else 256,
        seed=config.seed,
    )
    floor_bytes = unique_bytes(data) * shape.requests // len(data.block_tables)
    return StepPrediction(choices[0], kernels, floor_bytes, time.perf_counter() - began)
