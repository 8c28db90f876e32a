"""`page4 bench restore`: rows, checks, resumption, and refusals."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from page4.experiments import config_checks
from page4.experiments.bench import restore_measure, restore_study
from page4.experiments.bench.restore_config import RestoreBenchConfig
from page4.experiments.bench.restore_study import run
from page4.experiments.cli import run as run_command
from page4.kernels.errors import InputError
from page4.kvcache.host_tier import HostTier
from tests.experiments.acceptance.tiny_study import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sources") / "checkpoint")


def small(checkpoint: Path, **changes: Any) -> RestoreBenchConfig:
    values: dict[str, Any] = {
        "public_layers": 0, "model": checkpoint, "device": "cpu", "length": 96, "interval": 64,
        "prefill_chunk": 32, "others": 2, "other_length": 20, "restores": 2, "turns": 1, "steps": 3,
    }  # fmt: skip
    return RestoreBenchConfig(**(values | changes))


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("restore") / "out"
    return out, run(small(checkpoint), out)


def test_a_row_per_format_with_what_was_moved(finished: tuple[Path, dict[str, Any]]) -> None:
    out, summary = finished
    with (out / "restore.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["kv_format"] for row in rows] == ["fp16", "e4m3"]
    for row in rows:
        assert row["check"] == "equal"
        assert 0 < float(row["admission_p50_ms"]) <= float(row["restore_p50_ms"])
        assert 0 < float(row["step_beside_p50_ms"]) <= float(row["step_beside_p90_ms"])
        assert int(row["restores_beside"]) >= 2
    fp16, e4m3 = (int(row["restored_bytes"]) for row in rows)
    assert e4m3 < fp16, "six pages in each, and a state of the same size"
    assert summary["wrong"] == 0
    assert all(cell["speedup"] > 0 and cell["copy_share"] > 0 for cell in summary["cells"])
    assert {path.name for path in out.iterdir()} >= {"table.md", "restore.png", "provenance.json"}


def test_a_finished_folder_is_not_measured_again(
    checkpoint: Path, finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, summary = finished
    monkeypatch.setattr(restore_study, "RestoreCase", None)
    assert run(small(checkpoint), out) == summary


def test_bits_that_do_not_come_back_are_found_and_have_no_times(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if one byte of host memory had changed."""
    load = HostTier.load

    def flipped(self: HostTier, key: bytes, *arguments: Any) -> Any:
        self.content(key)[1][3] ^= 1
        return load(self, key, *arguments)

    monkeypatch.setattr(restore_measure, "pinned_bandwidth", lambda *arguments: 1.0)
    monkeypatch.setattr(HostTier, "load", flipped)
    summary = run(small(checkpoint, formats=("fp16",)), tmp_path / "out")
    assert summary["wrong"] == 1 and summary["cells"] == []
    assert "WRONG" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"formats": ()}, "formats must name at least one"),
        ({"formats": ("fp8",)}, "fp8"),
        ({"length": 100}, "length is 100, expected whole chunks of 32"),
        ({"interval": 48}, "interval is 48, expected a multiple of prefill_chunk, 32"),
        ({"prefill_chunk": 24}, "prefill_chunk is 24; reuse of prefixes needs a multiple of 16"),
        ({"others": 0}, "others must be at least 1, got 0"),
        ({"public_layers": 4}, "model and public_layers exclude each other"),
        ({"length": 8192}, "exceed the model's .* positions"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(small(checkpoint, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cpu_restores_prefixes_of_a_checkpoint_by_default() -> None:
    assert RestoreBenchConfig(device="cpu").resolve().public_layers == 0
    assert RestoreBenchConfig(device="cpu", public_layers=2).resolve().public_layers == 2
    assert RestoreBenchConfig.BY_DEVICE["cuda"]["public_layers"] == 8


def test_a_checkpoint_takes_the_place_of_random_layers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a GPU, whose default they are."""
    monkeypatch.setattr(config_checks, "resolve_device", lambda name: torch.device("cuda"))
    assert RestoreBenchConfig(model=checkpoint).resolve().public_layers == 0
    assert RestoreBenchConfig().resolve().public_layers == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_brings_back_the_same_bits_beside_captured_steps(tmp_path: Path) -> None:
    """Four layers of the public sizes, and the shipped checkpoint."""
    sizes: dict[str, Any] = {"device": "cuda", "restores": 3, "turns": 1, "steps": 6}
    for source in ({"public_layers": 4, "length": 8192, "interval": 4096}, {"public_layers": 0}):
        summary = run(RestoreBenchConfig(**(sizes | source)), tmp_path / str(source["public_layers"]))
        assert summary["wrong"] == 0
        assert all(cell["speedup"] > 1 for cell in summary["cells"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "restore", "--device", "cuda", "--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
