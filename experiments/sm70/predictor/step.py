"""Predicts the launches of one call in a step of equal requests, whatever the call does with its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from page4.experiments.gated_delta_cases import delta_copies, delta_inputs
from page4.experiments.kernel_cases import (
    StepShape,
    attention_copies,
    prepare_copies,
    score_copies,
    select_copies,
)
from page4.experiments.sm70 import step_inputs
from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.predictor.call import (
    KernelPrediction,
    Sample,
    launches_on_v100,
    own_storages,
    predict_launches,
)
from page4.experiments.verify_cases import verify_copies, verify_inputs


@dataclass(frozen=True)
class StepInputs:
    """How the inputs of a kind of call are made.

    Attributes:
        without_values: as launchers see them, on the GPU that is not there.
        with_values: a list of copies, of which one is needed, for a shape, device and seed.
        axis: of the launches' grids along which requests or their rows are counted.
    """

    without_values: Callable[[StepShape], Any]
    with_values: Callable[[StepShape, str, int], Sequence[Any]]
    axis: int = 0


STEP_INPUTS = {
    "attention": StepInputs(step_inputs.attention_inputs, attention_copies),
    "prepare": StepInputs(step_inputs.prepare_inputs, prepare_copies, axis=1),
    "scores": StepInputs(step_inputs.score_inputs, score_copies),
    "select": StepInputs(step_inputs.select_inputs, select_copies),
    "verify": StepInputs(verify_inputs, verify_copies),
    "gdn": StepInputs(delta_inputs, delta_copies, axis=1),
}


def predict_call(
    kind: str,
    shape: StepShape,
    call: Callable[[Any], object],
    compiler: Compiler,
    *,
    emulated: int = 1,
    most_replayed: int = 4,
    most_blocks: int = 256,
    seed: int = 0,
) -> tuple[list[KernelPrediction], Any]:
    """Predict what a call launches on a V100.

    Args:
        kind: of inputs, a key of :data:`STEP_INPUTS`.
        shape: of the step.
        call: a launcher with its configuration; gets the inputs.
        compiler: for the V100.
        emulated: requests whose programs are emulated.
        most_replayed: larger steps are replayed as a share of requests and machine, see :func:`divisor_of`.
        most_blocks: of a launch that are emulated, see :class:`Sample`.
        seed: of the values.

    Returns the kernels, and the inputs with values of the emulated requests.

    Raises:
        InputError: the call refuses the inputs, or a block does not fit on a V100.
        CompilationError: a kernel does not compile.
        EmulationError: the emulator cannot run a kernel.
    """
    inputs = STEP_INPUTS[kind]
    emulated = min(emulated, shape.requests)
    whole: list[Any] = []

    def call_without_values() -> None:
        whole.append(own_storages(inputs.without_values(shape)))
        call(whole[0])

    launches = launches_on_v100(call_without_values)
    data = inputs.with_values(replace(shape, requests=emulated), "cpu", seed)[0]
    divisor = divisor_of(shape.requests, most_replayed)
    sample = Sample(shape.requests, emulated, divisor, inputs.axis, most_blocks)
    return predict_launches(launches, whole[0], data, compiler, sample), data


def divisor_of(requests: int, most: int) -> int:
    """By what requests and machine are divided: 1, 2, 4 or 8, until at most so many requests are left.

    Less where requests do not divide.
    """
    divisor = 1
    while requests // divisor > most and requests % (2 * divisor) == 0 and divisor < 8:
        divisor *= 2
    return divisor
