"""`page4 sm70 validate` with real kernels and real checks: only the clock is the CPU's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from page4.experiments import gated_delta_cases, verify_cases
from page4.experiments.bench import gated_delta_case, verify_case
from page4.experiments.bench.machine import Launches
from page4.experiments.cli import run as run_command
from page4.experiments.gpu_timing import Timing
from page4.experiments.kernel_cases import StepShape
from page4.experiments.samples import Row, read_samples
from page4.experiments.sm70.prediction import study as prediction
from page4.experiments.sm70.prediction.config import Implementation, PredictConfig, StepKernel
from page4.experiments.sm70.prediction.step_kernels import row_of
from page4.experiments.sm70.validation import measure
from page4.experiments.sm70.validation.config import ValidateConfig
from page4.experiments.sm70.validation.measure import COLUMNS
from page4.experiments.sm70.validation.predictions import read_predictions
from page4.experiments.sm70.validation.report import agreement
from page4.experiments.sm70.validation.study import require_v100, run
from page4.experiments.sm70.validation.timing import time_behind_writer, validation_machine
from page4.kernels.errors import InputError
from tests.experiments.bench.small_bench import clock, small_machine
from tests.experiments.sm70.prediction.predicted_rows import predicted

NEEDS_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in Triton's interpreter")
SMALL = PredictConfig(
    requests=(2, 1), rows=(2,), heads=((4, 2),), formats=("e4m3",), head_dim=32, topk=8, context=70,
    step_context=70, step_kernels=("prepare", "scores", "select"), kernel_configs="defaults",
)  # fmt: skip


def predict(shape: StepShape, implementation: Implementation) -> Row:
    return predicted(shape, implementation, 10.0 * shape.requests)


def predict_kernel(kernel: StepKernel, shape: StepShape) -> Row:
    return row_of(kernel, shape) | {
        "status": "predicted", "predicted_us": 5.0, "floor_us": 2.0, "floor_fraction": 0.4, "launches": "x 5",
    }  # fmt: skip


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("predictions") / "out"
    digests: dict[str, Any] = {
        "code_of": lambda shape, name: name,
        "kernel_code_of": lambda kernel, shape: kernel,
    }
    prediction.run(SMALL, out, predict=predict, predict_kernel=predict_kernel, **digests)
    return out


def small(predictions: Path, **changes: Any) -> ValidateConfig:
    return dataclasses.replace(ValidateConfig(predictions=predictions, check_groups=2), **changes)


def machine(us: float = 20.0) -> Any:
    """The CPU, on which every call takes as long, and an empty one 2 us."""

    def timer(launches: Launches) -> Timing:
        clock(launches)
        return Timing(us, us - 1, us + 1, 3)

    return small_machine(timer=timer, launch_us=2.0)


@NEEDS_CPU
def test_every_prediction_is_measured_after_a_check(predictions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = run(small(predictions), out, machine=machine())
    rows = read_samples(out / "measurements.csv", COLUMNS)
    assert len(rows) == summary["rows"] == 2 * 2 + 3 * 2
    by_name = {(row["kernel"], row["requests"], row["implementation"]): row for row in rows}
    attention = by_name["attention", 2, "triton"]
    assert attention["status"] == "ok" and 0 < attention["error"] <= 1
    assert (attention["measured_us"], attention["ratio"]) == (18.0, 0.9)
    assert (attention["p10_us"], attention["p90_us"]) == (17.0, 19.0)
    # What cannot run here says so.
    assert by_name["attention", 2, "gluon"]["status"] == "absent"
    assert "needs a GPU" in by_name["attention", 2, "gluon"]["config"]
    for kernel in SMALL.step_kernels:
        assert by_name[kernel, 1, "triton"]["status"] == "ok"
        assert by_name[kernel, 1, "triton"]["ratio"] == 18 / 5
    assert summary["agreement"]["compared"] == 8
    report = (out / "report.md").read_text()
    assert "8 times compared" in report
    assert "send this whole folder back" in report
    assert str(predictions) not in "".join(file.read_text() for file in out.iterdir())


@NEEDS_CPU
def test_a_wrong_kernel_gets_no_time(
    predictions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(launches: Launches) -> Timing:
        raise AssertionError("a wrong kernel was timed")

    real = measure.measure

    def wrong(cell: Any, config: Any, where: Any) -> Any:
        from page4.experiments.bench import attention_case

        scaled = lambda *a, **k: tuple(x.mul_(1.1) for x in attention_case_real(*a, **k))  # noqa: E731
        attention_case_real = attention_case.page4_attention
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_case, "page4_attention", scaled)
            return real(cell, config, where)

    monkeypatch.setattr(measure, "measure", wrong)
    config = small(predictions, requests=(1,))
    summary = None
    with pytest.raises(AssertionError):  # the other calls are right, and so are timed
        run(config, tmp_path / "out", machine=small_machine(timer=never))
    rows = read_samples(tmp_path / "out" / "measurements.csv", COLUMNS)
    assert summary is None
    statuses = {row["implementation"]: row["status"] for row in rows}
    assert statuses == {"gluon": "absent", "triton": "wrong"}
    assert all(row["measured_us"] is None for row in rows)
    assert "wrong" in (tmp_path / "out" / "report.md").read_text()


@NEEDS_CPU
def test_on_another_gpu_nothing_is_compared(predictions: Path, tmp_path: Path) -> None:
    config = small(predictions, requests=(1,), other_gpu=True)
    summary = run(config, tmp_path / "out", machine=machine(), compared=False)
    assert summary["is_v100"] is False
    assert summary["agreement"] is None and summary["goals"] == []
    rows = read_samples(tmp_path / "out" / "measurements.csv", COLUMNS)
    assert {row["ratio"] for row in rows} == {None}
    assert "**This is no V100.**" in (tmp_path / "out" / "report.md").read_text()


@NEEDS_CPU
def test_a_finished_validation_is_only_reported_again(predictions: Path, tmp_path: Path) -> None:
    def never(launches: Launches) -> Timing:
        raise AssertionError("timed twice")

    config = small(predictions, requests=(1,))
    first = run(config, tmp_path / "out", machine=machine())
    assert run(config, tmp_path / "out", machine=small_machine(timer=never)) == first


def test_agreement_counts_both_directions() -> None:
    rows = [
        {"predicted_us": p, "measured_us": p * r, "ratio": r}
        for p, r in ((10.0, 1.1), (20.0, 0.8), (30.0, 2.0), (40.0, 1.0))
    ]
    found = agreement(rows)
    assert found is not None
    assert found["within 15 %"] == 0.5
    assert found["within 30 %"] == 0.75
    assert found["median_ratio"] == pytest.approx(1.05)
    assert found["rank_correlation"] == pytest.approx(0.8)
    assert agreement([]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--allow-other-gpu"], ["--quick"]):
        assert run_command(["sm70", "validate", *options]) == 2
        expected = "page4: page4 sm70 validate measures on a V100, and PyTorch sees no GPU\n"
        assert capsys.readouterr().err == expected


def test_measurements_and_what_shows_predictions_need_no_numba() -> None:
    """It comes with the extra of those who predict; a V100's owner and the notebooks do without."""
    modules = ("validation.study", "prediction.columns", "prediction.figure", "prediction.report")
    imports = "; ".join(f"import page4.experiments.sm70.{module}" for module in modules)
    program = f"import sys; sys.modules['numba'] = None; {imports}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_gpu_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(InputError, match=r"this is NVIDIA H200 \(9\.0\); --allow-other-gpu"):
        require_v100(other_gpu=False)
    assert require_v100(other_gpu=True) is False
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert require_v100(other_gpu=False) is True


def test_a_folder_without_predictions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no predictions\.csv"):
        run(ValidateConfig(predictions=tmp_path), tmp_path / "out", machine=machine())


@NEEDS_CPU
@pytest.mark.parametrize(
    ("kernel", "bench", "launcher", "output"),
    [
        ("verify", verify_case, "verify_triton", "accepted"),
        ("gdn", gated_delta_case, "gated_delta_triton", "out"),
    ],
)
def test_calls_of_the_public_model_are_the_bench_s(
    kernel: StepKernel,
    bench: Any,
    launcher: str,
    output: str,
    predictions: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"KEY_HEADS": 1, "VALUE_HEADS": 2, "HEAD_DIM": 16}.items():
        monkeypatch.setattr(gated_delta_cases, name, value)
    monkeypatch.setattr(verify_cases, "VOCABULARY", 3000)
    config = small(predictions)
    read = read_predictions(config)
    (row, *_) = read.step_kernels

    def measured() -> Row:
        return measure.measure_step_kernel(read, row | {"kernel": kernel}, config, machine(), compared=True)

    right = measured()
    assert (right["kernel"], right["status"], right["measured_us"]) == (kernel, "ok", 18.0)
    real = getattr(bench, launcher)

    def wrong(**inputs: Any) -> Any:
        result = real(**inputs)
        inputs[output][-1] += 1
        return result

    monkeypatch.setattr(bench, launcher, wrong)
    assert measured()["status"] == "wrong"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_clock_is_behind_a_writer() -> None:
    here = validation_machine(replays=5)
    assert 0 < here.launch_us < 100
    source = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    buffer = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    timing = time_behind_writer([partial(target.copy_, source)], lambda: buffer.fill_(1), 5)
    assert timing.samples == 5
    expected = 2e6 * len(source) / here.copy_bandwidth
    assert timing.median_us == pytest.approx(expected, rel=0.3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_command_runs_on_any_gpu(predictions: Path, tmp_path: Path) -> None:
    options = ["--set", f"predictions={predictions}", "--set", "requests=1", "--set", "replays=3"]
    command = ["sm70", "validate", "--allow-other-gpu", "--out", str(tmp_path / "out"), *options]
    assert run_command(command) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"].get("ok", 0) >= 4
    assert "wrong" not in summary["status"] and "failed" not in summary["status"]
