"""Every kernel of the hot path in every configuration that ships, as it is launched on a V100, A100 and H200.

Nothing here repeats what a launcher decides: launchers run on GPUs that are not there, and what they would
launch is noted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from page4.experiments.autotune.problems import PROBLEMS
from page4.experiments.autotune.shipped import shipped_files
from page4.experiments.kernel_cases import StepShape
from page4.experiments.sm70.compiling import Job
from page4.experiments.sm70.hyper_connection_calls import hyper_connection_calls
from page4.experiments.sm70.launches import Launch, recorded_launches
from page4.experiments.sm70.moe_calls import moe_calls
from page4.experiments.sm70.pretend_gpu import GPU, GPUS, pretend_gpu
from page4.experiments.sm70.recurrent_calls import recurrent_calls
from page4.experiments.sm70.sampling_calls import sampling_calls
from page4.experiments.sm70.step_inputs import (
    CONTEXT,
    USUAL,
    attention_inputs,
    in_words,
    prepare_inputs,
    score_inputs,
    select_inputs,
    step_shapes,
)
from page4.kernels import product_check_triton
from page4.kernels.block_select_triton import select_plan_triton
from page4.kernels.errors import InputError
from page4.kernels.index_scores_triton import index_scores_triton
from page4.kernels.page4_attention_dispatch import Implementation, page4_attention
from page4.kernels.product_check_triton import SIZE
from page4.kernels.qsa_prepare_triton import qsa_prepare_triton
from page4.kernels.tunable import AttentionKey, ScoresKey
from page4.kernels.tuning import use_configurations
from page4.kernels.tuning_file import Entry
from page4.kvcache import RECOMMENDED


@dataclass(frozen=True)
class KernelCase:
    """A kernel as it is launched somewhere.

    Attributes:
        kernel: name of the function.
        shape: of the step, in words.
        capability: of the GPU.
        launch: with tensors without values.
    """

    kernel: str
    shape: str
    capability: int
    launch: Launch

    @property
    def name(self) -> str:
        """All of it in words."""
        return f"{self.kernel} sm_{self.capability} {self.shape}"

    @property
    def job(self) -> Job:
        """What is compiled."""
        return self.launch.job(self.capability)


def kernel_cases(capability: int, thorough: bool = False) -> list[KernelCase]:
    """The kernels of a GPU, each kind of code once: launches that compile to the same are listed once.

    ``thorough`` is that of :func:`~page4.experiments.sm70.step_inputs.step_shapes`.

    Raises:
        InputError: no GPU with this compute capability is known.
    """
    if capability not in GPUS:
        raise InputError(f"compute capability {capability} is none of {', '.join(map(str, GPUS))}")
    gpu = GPUS[capability]
    cases: dict[str, KernelCase] = {}
    # Configurations that ship are listed one by one; a rule decides all others.
    with use_configurations("defaults"):
        for shape, call in _calls(gpu, thorough):
            with pretend_gpu(gpu), recorded_launches() as launches:
                call()
            for launch in launches:
                case = KernelCase(launch.kernel.fn.__name__, shape, capability, launch)
                cases.setdefault(json.dumps(case.job.request, sort_keys=True), case)
    return list(cases.values())


def _calls(gpu: GPU, thorough: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of launchers, each with its shape in words."""
    for shape in step_shapes(thorough):
        words = in_words(shape)
        yield words, partial(_attend, shape, "auto")
        yield words, partial(_attend, shape, "triton")
        yield words, partial(_prepare, shape)
        yield words, partial(_score, shape)
        yield words, partial(_select, shape)
    for context in (1024, 8192, 262144):
        shape = replace(USUAL, context=context)
        yield f"{in_words(shape)} of {context} tokens", partial(_select, shape)
    for file in shipped_files():
        if any(model in file.gpu for model in gpu.models):
            for entry in file.entries.values():
                yield f"as tuned: {_values(entry.key)}", partial(_shipped, file.kernel.name, entry)
                if (key := _recommended(entry.key)) not in file.entries:
                    borrowed = replace(entry, key=key)
                    yield f"as tuned: {_values(key)}", partial(_shipped, file.kernel.name, borrowed)
    yield from sampling_calls()
    yield from recurrent_calls()
    yield from hyper_connection_calls()
    yield from moe_calls()
    yield f"{SIZE}x{SIZE}", _product


def _recommended(key: Any) -> Any:
    """A key of e4m3 in the recommended format, which takes its entry and decodes otherwise; any other key."""
    return replace(key, kv_format=RECOMMENDED) if getattr(key, "kv_format", None) == "e4m3" else key


def _attend(shape: StepShape, implementation: Implementation) -> None:
    page4_attention(attention_inputs(shape), implementation)


def _prepare(shape: StepShape) -> None:
    qsa_prepare_triton(**vars(prepare_inputs(shape)))


def _score(shape: StepShape) -> None:
    index_scores_triton(**vars(score_inputs(shape)))


def _select(shape: StepShape) -> None:
    select_plan_triton(**vars(select_inputs(shape)))


def _product() -> None:
    factor = torch.empty(SIZE, SIZE, dtype=torch.float16)
    product_check_triton.product_kernel[(1,)](factor, factor, torch.empty(SIZE, SIZE), SIZE, num_warps=4)


def _shipped(kernel: str, entry: Entry) -> None:
    """A call that gets a recorded configuration."""
    key, context = entry.key, int(entry.conditions.get("context", CONTEXT))
    shape = replace(USUAL, context=context)
    if isinstance(key, AttentionKey):
        heads = key.heads_per_kv * key.kv_heads
        shape = replace(
            shape, requests=key.groups, rows=key.rows_per_group, query_heads=heads, kv_heads=key.kv_heads,
            head_dim=key.head_dim, kv_format=key.kv_format,
        )  # fmt: skip
        inputs: Any = attention_inputs(shape)
    elif isinstance(key, ScoresKey):
        shape = replace(shape, requests=key.groups, rows=key.rows_per_group, index_dim=key.index_dim)
        inputs = score_inputs(shape)
    else:
        shape = replace(
            shape, requests=key.rows, rows=1, query_heads=key.query_heads, kv_heads=key.kv_heads,
            head_dim=key.head_dim, index_dim=key.index_dim, kv_format=key.kv_format,
        )  # fmt: skip
        inputs = prepare_inputs(shape)
    PROBLEMS[kernel].run(inputs, entry.config)


def _values(key: Any) -> str:
    return " ".join(f"{name} {value}" for name, value in asdict(key).items())
