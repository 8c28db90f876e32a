"""A small step from the launcher to a predicted time, with everything in between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from page4.experiments.cli import run as run_command
from page4.experiments.kernel_cases import StepShape
from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.prediction.attention import predict_attention
from page4.experiments.sm70.prediction.config import PredictConfig, StepKernel
from page4.experiments.sm70.prediction.step_kernels import predict_step_kernel
from page4.experiments.sm70.predictor.step import divisor_of
from page4.experiments.sm70.toolchain import side_install
from page4.kernels.errors import InputError

STEP = StepShape(
    requests=4, rows=4, query_heads=6, kv_heads=1, context=512, overlap=0.9, kv_format="e4m3", topk=32
)

CONFIG = PredictConfig()


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(side_install())


def test_attention_and_merge_have_times_above_their_floor(compiler: Compiler) -> None:
    step = predict_attention(STEP, "gluon", compiler, CONFIG)
    names = [kernel.kernel for kernel in step.kernels]
    assert names == ["page4_attention_volta_kernel", "merge_kernel"]
    attention, merge = (kernel.prediction for kernel in step.kernels)
    assert attention.static.hmma > 0
    assert attention.static.spills == 0
    assert step.us == attention.us + merge.us
    assert step.us > 1e6 * step.floor_bytes / 830e9
    # Every request reads its K and V, though one alone was emulated.
    assert attention.emulated_blocks * STEP.requests == attention.blocks
    keys_and_values = step.floor_bytes - 3 * 2 * 16 * 6 * 256
    assert attention.replay.read_bytes >= 0.9 * keys_and_values
    # What attention wrote is in L2 when it is merged; the gate is not.
    assert merge.replay.read_bytes < 0.5 * merge.replay.l2_bytes


def test_all_requests_emulated_take_as_long_as_one_repeated(compiler: Compiler) -> None:
    step = replace(STEP, requests=2)  # of more, not all blocks of the merge would be emulated
    one, both = (
        predict_attention(step, "gluon", compiler, replace(CONFIG, sampled_requests=n)) for n in (1, 2)
    )
    assert [k.prediction.emulated_blocks for k in both.kernels] == [k.prediction.blocks for k in both.kernels]
    assert one.us == pytest.approx(both.us, rel=0.1)


def test_more_requests_take_longer(compiler: Compiler) -> None:
    few, many = (
        predict_attention(replace(STEP, requests=requests), "gluon", compiler, CONFIG).us
        for requests in (4, 64)
    )
    assert many > 2 * few


def test_a_share_of_machine_and_requests_takes_as_long_as_the_whole(compiler: Compiler) -> None:
    step = replace(STEP, requests=32)
    whole, share = (
        predict_attention(step, "gluon", compiler, replace(CONFIG, most_replayed_requests=most)).us
        for most in (32, 8)
    )
    assert share == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(
    ("requests", "most", "divisor"),
    [(16, 16, 1), (64, 16, 4), (48, 16, 4), (20, 16, 2), (17, 16, 1), (512, 1, 8)],
)
def test_shares_are_whole(requests: int, most: int, divisor: int) -> None:
    assert divisor_of(requests, most) == divisor


def test_what_a_v100_cannot_run_is_refused(compiler: Compiler) -> None:
    with pytest.raises(InputError, match="64 dimensions"):
        predict_attention(replace(STEP, head_dim=32), "gluon", compiler, CONFIG)


@pytest.mark.parametrize("kernel", get_args(StepKernel))
def test_other_calls_have_times_above_their_floor(compiler: Compiler, kernel: StepKernel) -> None:
    # These two have the public model's sizes, whatever the step.
    step = replace(STEP, requests=1, rows=1) if kernel in ("verify", "gdn") else STEP
    row = predict_step_kernel(kernel, step, compiler, CONFIG)
    assert row["status"] == "predicted"
    assert row["predicted_us"] > row["floor_us"] > 0


def test_the_command_leaves_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    settings = ("context=512", "topk=32", "formats=e4m3", "implementations=gluon", "requests=2")
    options = [text for setting in settings for text in ("--set", setting)]
    command = ["sm70", "predict", "--quick", "--out", str(out), *options, "--json"]
    assert run_command(command) == 0
    printed = capsys.readouterr().out
    assert "Attention and merge on a V100, predicted" in printed
    summary = json.loads(printed.splitlines()[-1])
    assert summary["predicted"] == 1
    assert summary["measured"] is False
    assert {"predictions.csv", "summary.json", "table.md", "roofline.png"} <= {f.name for f in out.iterdir()}


def test_a_wrong_setting_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sm70", "predict", "--set", "rows=9"]) == 2
    assert capsys.readouterr().err == "page4: rows of a step are 1..8, got 9\n"
