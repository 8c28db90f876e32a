"""Processes compile for an outline of the inputs, and one that crashes takes only its configuration along."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from page4.experiments.autotune.compiling import Compiled, CompilerPool, compile_configuration
from page4.experiments.autotune.outline import Outline
from page4.experiments.autotune.problems import PROBLEMS
from page4.experiments.kernel_cases import attention_copies
from page4.kernels.page4_attention_triton import AttentionConfig, page4_attention_triton
from tests.experiments.autotune.cpu_machine import CPU, NEEDS_CPU, small_step

KERNEL = "page4_attention_triton"
CONFIG = AttentionConfig(splits=2, tile_tokens=16, num_warps=4, num_stages=1)


@pytest.fixture(autouse=True)
def other_processes_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of this file are sent to them by name; pytest itself needs no path to import it."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).resolve().parents[3])])


def outline(**changes: object) -> Outline:
    return Outline.of(attention_copies(small_step(**changes), CPU)[0])


def crash_on_three_splits(kernel: str, outline: Outline, config: Any, device: torch.device) -> Compiled:
    if config.splits == 3:
        os._exit(1)
    return Compiled(spills=config.splits)


def lose_the_device_on_three_splits(
    kernel: str, outline: Outline, config: Any, device: torch.device
) -> Compiled:
    return Compiled(spills=os.getpid(), device_lost=config.splits == 3)


@pytest.mark.parametrize("kv_format", ["e4m3", "int8", "fp32"])
def test_an_outline_keeps_all_that_compilation_depends_on(kv_format: str) -> None:
    inputs = attention_copies(small_step(kv_format=kv_format), CPU)[0]
    sent = pickle.loads(pickle.dumps(Outline.of(inputs))).zeros(CPU)
    for name, value in vars(inputs).items():
        if isinstance(value, torch.Tensor):
            other = getattr(sent, name)
            pages = name.endswith("pages") or name.endswith("token_scales")
            assert other.shape[pages:] == value.shape[pages:], name
            assert other.stride() == value.stride() and other.dtype == value.dtype, name
            assert other.data_ptr() % 16 == 0 and value.data_ptr() % 16 == 0, name
        elif name != "plan":
            assert getattr(sent, name) == value
    for name, values in vars(inputs.plan).items():
        other = getattr(sent.plan, name)
        assert (other.shape, other.stride(), other.dtype) == (values.shape, values.stride(), values.dtype)
    assert sent.k_pages.shape[0] == 1


@NEEDS_CPU
def test_a_launch_on_an_outline_writes_nothing() -> None:
    inputs = outline().zeros(CPU)
    out = torch.full(inputs.q.shape, 7.0, dtype=inputs.q.dtype)
    lse = torch.full(inputs.q.shape[:2], 7.0)
    page4_attention_triton(inputs, CONFIG, out=out, lse=lse)
    assert (out == 7.0).all() and (lse == 7.0).all()


@NEEDS_CPU
@pytest.mark.parametrize("kernel", ["index_scores_triton", "qsa_prepare_triton"])
def test_a_launch_of_the_other_kernels_on_an_outline_stays_in_page_0(kernel: str) -> None:
    problem = PROBLEMS[kernel]
    (inputs,) = problem.copies(small_step(), CPU, 0, 1)
    assert compile_configuration(kernel, Outline.of(inputs), problem.default(inputs), CPU) == Compiled()


@NEEDS_CPU
def test_what_compiles_and_what_does_not() -> None:
    assert compile_configuration(KERNEL, outline(), CONFIG, CPU) == Compiled()
    # FP32 queries are nothing that the Gluon kernel takes: any refusal is an outcome, not a crash.
    compiled = compile_configuration("page4_attention_gluon", outline(kv_format="fp32"), CONFIG, CPU)
    assert compiled.error is not None
    assert compiled.error.startswith("InputError: the Gluon kernel") and "\n" not in compiled.error


def test_all_kernels_that_may_spill_are_looked_at() -> None:
    program = (
        "from page4.experiments.autotune.compiling import compiled_functions as f;"
        "print(*(function.fn.__name__ for function in f()))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    expected = {"page4_attention_kernel", "merge_kernel", "index_scores_kernel", "qsa_prepare_kernel"}
    names = set(run.stdout.split())
    assert expected <= names
    assert any("gluon" in name or "ampere" in name for name in names)


@NEEDS_CPU
def test_a_process_compiles_what_it_is_sent() -> None:
    with CompilerPool(1, CPU) as pool:
        assert pool.submit(KERNEL, outline(), CONFIG).result() == Compiled()


def test_a_crash_costs_one_configuration() -> None:
    configs = [AttentionConfig(splits, 16, 4, 1) for splits in (2, 3, 4)]
    shape = outline()
    with CompilerPool(1, CPU, crash_on_three_splits) as pool:
        results = [future.result() for future in [pool.submit(KERNEL, shape, config) for config in configs]]
    assert results == [
        Compiled(spills=2),
        Compiled("the compiler crashed", device_lost=True),
        Compiled(spills=4),
    ]


def test_a_process_that_lost_its_device_compiles_no_more() -> None:
    shape = outline()
    with CompilerPool(1, CPU, lose_the_device_on_three_splits) as pool:
        first, lost, last = (
            pool.submit(KERNEL, shape, AttentionConfig(splits, 16, 4, 1)).result() for splits in (2, 3, 4)
        )
    assert first.spills == lost.spills != last.spills  # process ids
