"""The predictions as a study: its folder, its resumption and its report."""

from __future__ import annotations

import csv
import inspect
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from page4.experiments.kernel_cases import StepShape
from page4.experiments.samples import Row
from page4.experiments.sm70.prediction import study
from page4.experiments.sm70.prediction.attention import attention_digest
from page4.experiments.sm70.prediction.config import Implementation, PredictConfig, StepKernel
from page4.experiments.sm70.prediction.step_kernels import (
    row_of,
    step_kernel_digest,
    step_kernel_without_time,
)
from page4.experiments.sm70.predictor import call_digest
from page4.experiments.sm70.predictor.step import STEP_INPUTS
from page4.kernels.errors import InputError
from page4.kernels.tuning import use_configurations
from tests.experiments.sm70.prediction.predicted_rows import invented

CONFIG = PredictConfig(
    requests=(16, 64), formats=("e4m3", "int8"), kernel_configs="defaults", step_kernels=()
)

# Recording what would be launched takes longer than all else here.
run = partial(study.run, code_of=lambda shape, name: name, kernel_code_of=lambda kernel, shape: kernel)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("predict") / "out"
    return out, run(CONFIG, out, predict=invented)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_per_step_and_implementation(finished: tuple[Path, dict[str, Any]]) -> None:
    out, summary = finished
    rows = read(out / "predictions.csv")
    assert len(rows) == summary["rows"] == 2 * (2 * 2 * 2 + 2 * 2)
    assert summary["refused"] == 4
    assert summary["predicted"] == len(rows) - 4
    assert {row["status"] for row in rows} == {"predicted", "refused"}


def test_nothing_is_called_measured(finished: tuple[Path, dict[str, Any]]) -> None:
    out, summary = finished
    assert summary["measured"] is False
    assert json.loads((out / "summary.json").read_text())["measured"] is False
    text = (out / "table.md").read_text()
    assert "predicted, us" in text
    assert "none was measured" in text
    assert "emulated" in text


def test_the_table_says_why_there_is_no_time(finished: tuple[Path, dict[str, Any]]) -> None:
    text = (finished[0] / "table.md").read_text()
    assert "refused: it reads fp16, got int8" in text
    attention = text.split("\n\n")[1]
    assert len({line.count("|") for line in attention.splitlines()}) == 1


def test_goals_are_judged(finished: tuple[Path, dict[str, Any]]) -> None:
    out, summary = finished
    assert summary["goals_met"] + summary["goals_missed"] == len(summary["goals"]) > 0
    # 16 requests: 32 of 36 us; 64: 128 of 115 us.
    by_cell = {(goal["cell"], goal["what"]): goal["met"] for goal in summary["goals"]}
    assert by_cell["16 x 4, 6/1, e4m3", "microseconds"]
    assert not by_cell["64 x 4, 6/1, e4m3", "microseconds"]
    assert "MISSED" in (out / "table.md").read_text()


def test_the_roofline_is_a_picture(finished: tuple[Path, dict[str, Any]]) -> None:
    height, width, _ = matplotlib.image.imread(finished[0] / "roofline.png").shape
    assert min(height, width) > 300


def test_an_interrupted_study_is_resumed(tmp_path: Path) -> None:
    calls: list[tuple[StepShape, Implementation]] = []

    def interrupted(shape: StepShape, implementation: Implementation) -> Row:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append((shape, implementation))
        return invented(shape, implementation)

    def resumed(shape: StepShape, implementation: Implementation) -> Row:
        assert (shape, implementation) not in calls
        return invented(shape, implementation)

    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, tmp_path / "out", predict=interrupted)
    assert len(read(tmp_path / "out" / "predictions.csv")) == 3
    assert (tmp_path / "out" / "table.md").exists()
    assert run(CONFIG, tmp_path / "out", predict=resumed)["rows"] == 24
    # A finished one is only reported again, without a compiler.
    assert run(CONFIG, tmp_path / "out")["rows"] == 24


def test_only_what_would_be_launched_otherwise_is_predicted_again(tmp_path: Path) -> None:
    run(CONFIG, tmp_path / "out", predict=invented)
    changed: list[StepShape] = []

    def again(shape: StepShape, implementation: Implementation) -> Row:
        assert implementation == "gluon"
        changed.append(shape)
        return invented(shape, implementation) | {"registers": 77}

    def code_of(shape: StepShape, implementation: Implementation) -> str:
        is_other = (shape.requests, implementation) == (64, "gluon")
        return "other" if is_other else implementation

    run(CONFIG, tmp_path / "out", predict=again, code_of=code_of)
    rows = read(tmp_path / "out" / "predictions.csv")
    assert len(rows) == 24
    assert {shape.requests for shape in changed} == {64}
    assert {row["requests"] for row in rows if row["registers"] == "77"} == {"64"}
    # The table keeps its order.
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.index("| 64 x 4, 6/1, e4m3 | gluon") < table.index("| 16 x 1, 6/1, e4m3 | gluon")


def test_digests_follow_configurations_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    step = StepShape(
        requests=16, rows=4, query_heads=6, kv_heads=1, context=512, overlap=0.9, kv_format="e4m3"
    )
    with use_configurations("defaults"):
        first = attention_digest(step, "gluon")
        assert first == attention_digest(step, "gluon")
        assert first != attention_digest(step, "triton")
        # Only the number of splits differs, in the grid and in constants.
        assert first != attention_digest(replace(step, requests=64), "gluon")
        assert attention_digest(replace(step, head_dim=32), "gluon") == "refused"
        scores = step_kernel_digest("scores", step)
        monkeypatch.setattr(call_digest, "_model_digest", lambda: b"another model")
        assert step_kernel_digest("scores", step) != scores


def test_digests_follow_the_code_that_makes_inputs() -> None:
    makers = {Path(inspect.getfile(inputs.with_values)).resolve() for inputs in STEP_INPUTS.values()}
    assert makers <= set(call_digest.model_files())


def test_other_calls_have_a_table_of_their_own(tmp_path: Path) -> None:
    def kernel_row(kernel: StepKernel, shape: StepShape) -> Row:
        if kernel == "scores":
            return step_kernel_without_time(kernel, shape, "failed", "an unknown\ninstruction")
        return row_of(kernel, shape) | {
            "status": "predicted", "launches": "one_kernel 3.0", "predicted_us": 3.0, "floor_us": 1.5,
            "floor_fraction": 0.5, "bound": "DRAM", "registers": 32, "spills": 0, "blocks": 4,
            "emulated_blocks": 1, "seconds": 0.1, "code": "",
        }  # fmt: skip

    config = replace(CONFIG, step_kernels=("prepare", "scores"), formats=("e4m3",))
    summary = run(config, tmp_path / "out", predict=invented, predict_kernel=kernel_row)
    assert len(read(tmp_path / "out" / "kernels.csv")) == summary["step_kernels"] == 2 * 2 * 2
    assert summary["failed"] == 4
    text = (tmp_path / "out" / "table.md").read_text()
    assert "failed: an unknown instruction" in text
    assert "| prepare, 64 x 4, 6/1, e4m3 | share of 830 GB/s | >= 0.7 | 0.5 | MISSED |" in text


def test_another_configuration_needs_another_folder(finished: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="rows"):
        run(PredictConfig(rows=(1,)), finished[0], predict=invented)


def test_a_missing_folder_of_configurations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        run(PredictConfig(kernel_configs=tmp_path / "nothing"), tmp_path / "out", predict=invented)
    assert not (tmp_path / "out").exists()


def test_the_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE4_SM70", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="make sm70"):
        run(CONFIG, tmp_path / "out")
