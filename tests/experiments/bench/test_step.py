"""`page4 bench step`: rows, checks, resumption, and the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from page4.experiments.bench import step_measure, step_study
from page4.experiments.bench.step_config import StepBenchConfig
from page4.experiments.bench.step_report import markdown
from page4.experiments.bench.step_study import run, windows
from page4.experiments.cli import run as run_command
from page4.kernels.errors import InputError
from tests.experiments.acceptance.tiny_study import write_checkpoint, write_texts

GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        "model": write_checkpoint(folder / "checkpoint"),
        "texts": write_texts(folder / "texts", first=300, second=400),
    }


def small(sources: dict[str, Any], **changes: Any) -> StepBenchConfig:
    values = {"device": "cpu", "lengths": (40, 64), "batches": (1, 3), "turns": 2, "steps": 2}
    return StepBenchConfig(**(values | sources | changes))


@pytest.fixture(scope="module")
def finished(
    sources: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, StepBenchConfig, dict[str, Any]]:
    out, config = tmp_path_factory.mktemp("step") / "out", small(sources)
    return out, config, run(config, out)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_per_length_batch_and_format(
    finished: tuple[Path, StepBenchConfig, dict[str, Any]],
) -> None:
    out, _, summary = finished
    rows = read(out / "step.csv")
    cells = [(int(row["length"]), int(row["batch"]), row["kv_format"]) for row in rows]
    assert cells == [(n, b, f) for n in (40, 64) for b in (1, 3) for f in ("fp16", "e4m3")]
    for row in rows:
        assert int(row["steps"]) == 4, "two turns of two steps"
        assert 0 < float(row["step_p10_ms"]) <= float(row["step_p50_ms"]) <= float(row["step_p90_ms"])
        assert 1 <= float(row["tokens_per_step"]) <= 4
        assert row["check"] == "no graph" and row["launches"] == ""
    assert summary["wrong"] == 0 and len(summary["cells"]) == 8
    assert summary["cells"][0]["of_first_format"] is None and summary["cells"][1]["of_first_format"] > 0
    assert {path.name for path in out.iterdir()} >= {"table.md", "step.png", "provenance.json"}


def test_a_finished_folder_is_not_measured_again(
    finished: tuple[Path, StepBenchConfig, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, config, summary = finished
    monkeypatch.setattr(step_study, "measure_cell", None)
    assert run(config, out) == summary


def test_a_wrong_graph_has_no_time(
    sources: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_measure.StepCase, "check", lambda self: "WRONG")
    summary = run(small(sources, lengths=(40,), batches=(1,)), tmp_path / "out")
    assert summary["wrong"] == 2 and summary["cells"] == []
    rows = read(tmp_path / "out" / "step.csv")
    assert {row["step_p50_ms"] for row in rows} == {""}
    assert "WRONG" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")


def test_the_command(sources: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"model": sources["model"], "texts": sources["texts"], "lengths": "[40]", "batches": "[1]"}
    overrides = [text for key, value in values.items() for text in ("--set", f"{key}={value}")]
    arguments = ["bench", "step", "--quick", "--device", "cpu", "--out", str(tmp_path / "out"), *overrides]
    assert run_command([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["study"] == "bench step"
    assert "step p50, ms" in captured.out
    assert run_command([*arguments, "--set", "formats=[fp7]"]) == 2
    assert "KV format 'fp7' is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "lengths must name at least one value"),
        ({"batches": (0,)}, "batches must be positive, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"num_draft_tokens": 8}, "num_draft_tokens must be 0 to 7, got 8"),
        ({"lengths": (500,)}, "the longest text has 400 tokens, 500 are asked for"),
        ({"steps": 2000}, "exceed the model's 4096 positions"),
    ],
)
def test_wrong_settings_are_refused(
    sources: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(small(sources, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cpu_gets_few_steps_and_a_gpu_many() -> None:
    chosen = StepBenchConfig(device="cpu").resolve()
    assert (chosen.lengths, chosen.batches, chosen.backend) == ((1024, 4096), (1, 4), "reference")
    given = StepBenchConfig(device="cpu", lengths=(16,), batches=(2,)).resolve()
    assert (given.lengths, given.batches) == ((16,), (2,)), "what was asked for stays"
    assert StepBenchConfig.BY_DEVICE["cuda"]["lengths"][-1] == 32000


def test_windows_are_different_places_of_the_texts() -> None:
    texts = [list(range(100)), list(range(200, 260)), list(range(300, 310))]
    found = windows(texts, 20, 8, seed=0)
    assert all(len(window) == 20 for window in found)
    assert len({tuple(window) for window in found}) == 8
    assert not any(300 in window for window in found), "a text that is too short is left out"


def test_the_table_names_what_formats_are_compared_with() -> None:
    row = dict.fromkeys(step_measure.COLUMNS) | {
        "length": 1024, "batch": 1, "step_p50_ms": 2.0, "step_p10_ms": 1.9, "step_p90_ms": 2.2,
        "tokens_per_s": 1000.0, "tokens_per_step": 2.0, "launches": 1, "kernels": 300, "check": "equal",
    }  # fmt: skip
    rows = [row | {"kv_format": "fp16"}, row | {"kv_format": "e4m3", "step_p50_ms": 1.0}]
    table = markdown(rows)
    assert "| 1k | 1 | e4m3 | 1.000 | 1.900 to 2.200 | 0.500 | 1000 | 2.00 | 1 | 300 | equal |" in table


@pytest.mark.skipif(not GPU, reason="graphs need a GPU")
def test_graphs_are_checked_and_counted(sources: dict[str, Any], tmp_path: Path) -> None:
    run(small(sources, device="cuda", formats=("fp16", "e4m3", "int8")), tmp_path / "out")
    for row in read(tmp_path / "out" / "step.csv"):
        assert row["check"] == "equal" and row["graph"] == "True"
        assert row["launches"] == "1" and int(row["kernels"]) > 20


@pytest.mark.skipif(not GPU, reason="graphs need a GPU")
def test_a_graph_of_another_step_is_found_out(
    sources: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from page4.spec_decode.decode_step import DecodeStep

    original = DecodeStep.run

    def run_differently(self: DecodeStep, lanes: torch.Tensor, shape: Any) -> torch.Tensor:
        result = original(self, lanes, shape)
        if torch.cuda.is_current_stream_capturing():
            self.state.values[:, -1] += 1
        return result

    monkeypatch.setattr(DecodeStep, "run", run_differently)
    summary = run(small(sources, device="cuda", lengths=(40,), batches=(1,)), tmp_path / "out")
    assert summary["wrong"] == 2
