"""The dispatcher runs the fastest implementation that can run, says which, and never replaces a request."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import triton

from page4.kernels.errors import InputError
from page4.kernels.page4_attention_dispatch import (
    choose_implementation,
    chosen,
    default_attention_config,
    gluon_obstacle,
    page4_attention,
)
from page4.kernels.page4_attention_gluon import GLUON_FORMATS
from page4.kernels.page4_attention_triton import AttentionConfig
from page4.kernels.tunable import TUNABLE, AttentionKey
from page4.kernels.tuning import active, device_name, triton_version, use_configurations
from page4.kernels.tuning_file import Entry, TuningFile, tuning_path
from tests.kernels.attention_cases import DEVICE, make_case

CPU_ONLY = pytest.mark.skipif(DEVICE == "cuda", reason="what a machine without a GPU does")
GPU_ONLY = pytest.mark.skipif(DEVICE != "cuda", reason="what a machine with a GPU does")
KERNEL = TUNABLE["page4_attention_triton"]


def write_configuration(folder: Path, key: AttentionKey, config: AttentionConfig) -> Path:
    """A folder of configurations with one entry for this machine."""
    gpu, version = device_name(torch.device(DEVICE)), triton_version()
    entry = Entry(key, config, 5.0, 6.0, "2026-11-29", {})
    file = folder / tuning_path(KERNEL.name, gpu, version)
    file.parent.mkdir(parents=True)
    file.write_text(TuningFile(KERNEL, gpu, version, {key: entry}).text(), encoding="utf-8")
    return file


@pytest.mark.parametrize("kv_format", GLUON_FORMATS)
@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 9), (9, 0), (10, 0)])
def test_gluon_runs_on_capability_7_0_and_from_8_on(capability: tuple[int, int], kv_format: str) -> None:
    name, why = choose_implementation("auto", capability, torch.float16, kv_format)
    assert (name, why) == ("gluon", "the fastest that can run")
    assert choose_implementation("gluon", capability, torch.float16, kv_format) == ("gluon", "asked for")
    assert choose_implementation("triton", capability, torch.float16, kv_format) == ("triton", "asked for")


@pytest.mark.parametrize(
    ("capability", "dtype", "kv_format", "obstacle"),
    [
        ((6, 1), torch.float16, "e4m3", "it needs compute capability 7.0, 8.0 or newer, the GPU has 6.1"),
        ((7, 5), torch.float16, "fp16", "it needs compute capability 7.0, 8.0 or newer, the GPU has 7.5"),
        ((7, 0), torch.float16, "fp32", "it reads fp16, e4m3, e5m2, e3m4, e2m5, int8, got fp32"),
        ((9, 0), torch.float32, "fp16", "it takes float16 queries, got float32"),
        ((9, 0), torch.float16, "int8", "it reads fp16, e4m3, e5m2, e3m4, e2m5, got int8"),
        ((9, 0), torch.float16, "fp32", "it reads fp16, e4m3, e5m2, e3m4, e2m5, got fp32"),
        (None, torch.float16, "e4m3", "it needs a GPU"),
    ],
)
def test_where_gluon_cannot_run_auto_says_why_and_a_request_is_refused(
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    kv_format: str,
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert gluon_obstacle(capability, dtype, kv_format) == obstacle
    name, why = choose_implementation("auto", capability, dtype, kv_format)
    assert (name, why) == ("triton", f"gluon cannot run: {obstacle}")
    with pytest.raises(InputError) as refusal:
        choose_implementation("gluon", capability, dtype, kv_format)
    assert str(refusal.value) == f"implementation 'gluon' cannot run: {obstacle}"


def test_on_capability_7_0_gluon_reads_int8_too() -> None:
    assert choose_implementation("auto", (7, 0), torch.float16, "int8")[0] == "gluon"


def test_small_heads_get_plain_triton_on_capability_7_0() -> None:
    obstacle = "on compute capability 7.0 it takes heads of 64 dimensions or more, got 32"
    name, why = choose_implementation("auto", (7, 0), torch.float16, "e4m3", head_dim=32)
    assert (name, why) == ("triton", f"gluon cannot run: {obstacle}")
    with pytest.raises(InputError, match=obstacle):
        choose_implementation("gluon", (7, 0), torch.float16, "e4m3", head_dim=32)
    assert gluon_obstacle((8, 0), torch.float16, "e4m3", head_dim=32) is None


def test_nothing_runs_without_a_gpu_and_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    for name in ("auto", "triton"):
        with pytest.raises(InputError, match="needs a GPU, or TRITON_INTERPRET=1"):
            choose_implementation(name, None, torch.float16, "e4m3")


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(InputError, match="'cuda' is unknown, expected one of auto, gluon, triton"):
        page4_attention(make_case().inputs, "cuda")  # type: ignore[arg-type]


@CPU_ONLY
def test_a_request_for_gluon_is_refused_before_anything_is_written() -> None:
    case = make_case()
    out = torch.full(case.inputs.q.shape, 7.0, dtype=torch.float16)
    with pytest.raises(InputError, match="implementation 'gluon' cannot run: it needs a GPU"):
        page4_attention(case.inputs, "gluon", out=out)
    assert (out == 7.0).all()


@GPU_ONLY
@pytest.mark.parametrize("kv_format", GLUON_FORMATS)
def test_both_implementations_give_what_float64_says(kv_format: str) -> None:
    case = make_case(length=300, dim=128, topk=40, kv_format=kv_format, gate=True)
    for implementation in ("auto", "gluon", "triton"):
        case.check(*page4_attention(case.inputs, implementation))  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_format", ["e4m3", "int8", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_default_choice_computes_attention(kv_format: str, dtype: torch.dtype) -> None:
    case = make_case(kv_format=kv_format, dtype=dtype, gate=True)
    with use_configurations("defaults"):
        choice = chosen(case.inputs)
        case.check(*page4_attention(case.inputs))
    assert choice.source == "default"
    assert choice.config == default_attention_config(case.inputs, choice.implementation)


def test_a_recorded_configuration_is_used_and_noted(tmp_path: Path) -> None:
    case = make_case(kv_format="e4m3")
    key = AttentionKey.of(case.inputs)
    config = AttentionConfig(splits=2, tile_tokens=16, num_warps=4, num_stages=1)
    file = write_configuration(tmp_path, key, config)
    assert config != default_attention_config(case.inputs, "triton")
    with use_configurations(tmp_path) as configurations:
        choice = chosen(case.inputs, "triton")
        assert (choice.config, choice.source) == (config, "exact")
        # A second look gives the very same choice: nothing is read or computed again.
        file.unlink()
        assert chosen(case.inputs, "triton") is choice
        case.check(*page4_attention(case.inputs, "triton"))
        record = configurations.record()
    assert record["used"] == [
        {
            "kernel": KERNEL.name,
            "key": dataclasses.asdict(key),
            "config": dataclasses.asdict(config),
            "origin": "exact",
        }
    ]
    assert json.loads(json.dumps(record)) == record
    assert active().folder != tmp_path


def test_float32_queries_do_not_get_what_was_measured_with_float16(tmp_path: Path) -> None:
    case = make_case(dtype=torch.float32)
    config = AttentionConfig(splits=2, tile_tokens=16, num_warps=4, num_stages=1)
    write_configuration(tmp_path, AttentionKey.of(case.inputs), config)
    with use_configurations(tmp_path):
        assert chosen(case.inputs, "triton").source == "default"


def test_calls_that_differ_in_shape_have_choices_of_their_own() -> None:
    with use_configurations("defaults"):
        choices = [
            chosen(make_case(length=length, rows=rows, rows_per_group=rows, topk=64).inputs, "triton")
            for length, rows in ((20, 1), (240, 1), (240, 8))
        ]
        inputs = make_case(length=240, rows=8, rows_per_group=8, topk=64).inputs
        assert chosen(inputs, "triton") is choices[2]
    assert len({id(choice) for choice in choices}) == 3
