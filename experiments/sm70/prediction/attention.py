"""Predicts the attention and merge of one step, by one implementation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from page4.experiments.kernel_cases import StepShape, attention_inputs, unique_bytes
from page4.experiments.sm70 import step_inputs
from page4.experiments.sm70.compiling import CompilationError, Compiler
from page4.experiments.sm70.emulator import EmulationError
from page4.experiments.sm70.prediction.config import Implementation, PredictConfig
from page4.experiments.sm70.predictor.call import KernelPrediction, Sample, launches_on_v100, predict_launches
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
    emulated = min(config.sampled_requests, shape.requests)
    data = attention_inputs(replace(shape, requests=emulated), "cpu", config.seed)
    sample = Sample(shape.requests, emulated, divisor_of(shape.requests, config.most_replayed_requests))
    whole: list[AttentionInputs] = []
    choices: list[Choice] = []

    def call() -> None:
        whole.append(_without_values(shape))
        choices.append(chosen(whole[0], implementation))
        page4_attention(whole[0], implementation)

    launches = launches_on_v100(call)
    kernels = predict_launches(launches, whole[0], data, compiler, sample)
    floor_bytes = unique_bytes(data) * shape.requests // emulated
    return StepPrediction(choices[0], kernels, floor_bytes, time.perf_counter() - began)


def divisor_of(requests: int, most: int) -> int:
    """By what requests and machine are divided: 1, 2, 4 or 8, until at most so many requests are left.

    Less where requests do not divide.
    """
    divisor = 1
    while requests // divisor > most and requests % (2 * divisor) == 0 and divisor < 8:
        divisor *= 2
    return divisor


def _without_values(shape: StepShape) -> AttentionInputs:
    """Inputs as the launcher sees them, every tensor in a storage of its own."""
    inputs = step_inputs.attention_inputs(shape)
    scales = inputs.v_token_scales
    return dataclasses.replace(
        inputs,
        v_pages=torch.empty_like(inputs.v_pages),
        v_token_scales=None if scales is None else torch.empty_like(scales),
    )
