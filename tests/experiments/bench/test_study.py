"""The bench as a study: its folder, its resumption, its report, and the command."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

from page4.experiments import bench as bench_package
from page4.experiments.bench import attention_case
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.machine import Launches, Machine
from page4.experiments.bench.study import run
from page4.experiments.cli import run as run_command
from page4.experiments.gpu_timing import Timing
from page4.experiments.progress import Reporter
from page4.kernels.errors import InputError
from tests.experiments.bench.small_bench import clock, small_config, small_machine
from tests.experiments.bench.test_cases import scaled_attention

# On a GPU the model gets other kernels: test_on_gpu.py.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")

QUICK_KERNELS: tuple[Any, ...] = ("index_scores", "page4_attention", "planned_attention")


class Counter:
    """A clock that counts how many series it has timed."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.timed, self.stop_after = 0, stop_after

    def __call__(self, launches: Launches) -> Timing:
        if self.timed == self.stop_after:
            raise KeyboardInterrupt
        self.timed += 1
        return clock(launches)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], BenchConfig]:
    out = tmp_path_factory.mktemp("bench") / "out"
    config = small_config(kernels=QUICK_KERNELS, formats=("e4m3", "fp16"))
    return out, run(config, out, machine=small_machine()), config


def test_a_row_per_cell_and_implementation(finished: tuple[Path, dict[str, Any], BenchConfig]) -> None:
    out, summary, _ = finished
    rows = read(out / "bench.csv")
    assert [(row["kernel"], row["kv_format"], row["implementation"]) for row in rows] == [
        ("index_scores", "", "triton"),
        ("page4_attention", "e4m3", "triton"),
        ("page4_attention", "e4m3", "pytorch"),
        ("page4_attention", "fp16", "triton"),
        ("page4_attention", "fp16", "pytorch"),
        ("planned_attention", "e4m3", "triton"),
        ("planned_attention", "fp16", "triton"),
    ]
    assert all(row["status"] == "ok" and float(row["median_us"]) > 0 for row in rows)
    assert summary["rows"] == summary["timed"] == 7 and summary["wrong"] == summary["failed"] == 0
    assert summary["goals_met"] + summary["goals_missed"] == 2  # e4m3 against fp16, twice
    assert json.loads((out / "summary.json").read_text(encoding="utf-8")) == summary


def test_the_table_names_times_goals_and_what_is_absent(
    finished: tuple[Path, dict[str, Any], BenchConfig],
) -> None:
    out, _, _ = finished
    table = (out / "table.md").read_text(encoding="utf-8")
    row = read(out / "bench.csv")[1]
    assert f"| 2 x 3, 4/2, 70, 0.5, e4m3 | triton * | {float(row['median_us']):.1f} |" in table
    assert "<= 1 x the fp16 time: " in table
    assert "in 2 of 2 groups" in table
    assert "No gluon row in 4 cells: implementation 'gluon' cannot run" in table
    assert "No vllm row in 2 cells: " in table


def test_the_roofline_shows_something(finished: tuple[Path, dict[str, Any], BenchConfig]) -> None:
    image = matplotlib.image.imread(finished[0] / "roofline.png")
    assert image.std() > 0.05 and image.shape[1] > 900  # three panels


def test_the_folder_says_where_it_comes_from(finished: tuple[Path, dict[str, Any], BenchConfig]) -> None:
    out, _, _ = finished
    (recorded,) = json.loads((out / "provenance.json").read_text(encoding="utf-8"))["runs"]
    assert recorded["finished"] and recorded["copy_bandwidth"] > 0 and recorded["versions"]["torch"]
    assert recorded["kernel_configs"]["source"] == "shipped"
    assert {used["kernel"] for used in recorded["kernel_configs"]["used"]} >= {"page4_attention_triton"}
    assert "sweep: axes" in (out / "config.yaml").read_text(encoding="utf-8")


def test_a_finished_bench_measures_nothing_again(
    finished: tuple[Path, dict[str, Any], BenchConfig],
) -> None:
    out, summary, config = finished
    before = (out / "bench.csv").read_text(encoding="utf-8")
    counter = Counter()
    assert run(config, out, machine=small_machine(timer=counter)) == summary
    assert counter.timed == 0
    assert (out / "bench.csv").read_text(encoding="utf-8") == before


def test_an_interrupted_bench_reports_and_resumes(tmp_path: Path) -> None:
    config = small_config(kernels=("index_scores", "page4_attention"), implementations=("triton",))
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", machine=small_machine(timer=Counter(stop_after=1)))
    assert [row["kernel"] for row in read(tmp_path / "out" / "bench.csv")] == ["index_scores"]
    assert "index_scores" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    counter = Counter()
    summary = run(config, tmp_path / "out", machine=small_machine(timer=counter))
    assert counter.timed == 1 and summary["rows"] == 2


def test_progress_counts_compilations_and_cells(tmp_path: Path) -> None:
    steps: list[Any] = []

    class Record:
        def start(self, total: int, done: int = 0) -> None:
            steps.append((total, done))

        def advance(self, description: str = "", steps: int = 1) -> None:
            described.append(description)

    described: list[str] = []
    config = small_config(kernels=("index_scores",))
    run(config, tmp_path / "out", Record(), small_machine())
    assert steps == [(2, 0)]
    assert described == ["compiled", "index_scores 2 x 3, 70"]


def study_on(machine: Machine) -> Callable[[BenchConfig, Path, Reporter], dict[str, Any]]:
    """The study as the command calls it, on a machine without a GPU."""

    def study(config: BenchConfig, out: Path, progress: Reporter) -> dict[str, Any]:
        return run(config, out, progress, machine)

    return study


ARGUMENTS = [
    "--quick", "--set", "requests=1", "--set", "contexts=70", "--set", "heads=[[4, 2]]",
    "--set", "formats=e4m3", "--set", "head_dim=32", "--set", "topk=8", "--set", "implementations=triton",
]  # fmt: skip


def test_a_wrong_kernel_makes_the_command_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_case, "page4_attention", scaled_attention)
    monkeypatch.setattr(bench_package, "run", study_on(small_machine()))
    out = tmp_path / "out"
    assert run_command(["bench", "page4_attention", *ARGUMENTS, "--out", str(out), "--json"]) == 1
    captured = capsys.readouterr()
    assert "WRONG: error" in captured.out and "1 wrong and 0 failed rows" in captured.out
    summary = json.loads(captured.out.splitlines()[-1])
    assert summary["wrong"] == 1 and summary["timed"] == 0 and summary["copy_bandwidth"] is None
    (row,) = read(out / "bench.csv")
    assert row["status"] == "wrong" and row["median_us"] == ""
    assert not (out / "roofline.png").exists()


def test_a_right_kernel_makes_it_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_package, "run", study_on(small_machine()))
    out = tmp_path / "out"
    assert run_command(["bench", "planned_attention", *ARGUMENTS, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "**planned_attention**" in captured.out and f"figure: {out / 'roofline.png'}" in captured.out


@pytest.mark.parametrize(
    "arguments", [["bench"], ["bench", "planned_attention", "--quick"], ["bench", "--device", "cuda"]]
)
def test_without_a_gpu_the_command_refuses_in_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        "page4: page4 bench times kernels on a CUDA GPU, and PyTorch sees none"
    )
    assert captured.out == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "attention"], "no kernel, expected one of qsa_prepare, index_scores"),
        (["bench", "--device", "cpu"], "must be one of auto, cuda, got 'cpu'"),
        (["bench", "--set", "overlap=0.9"], "did you mean 'overlaps'?"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_folder_of_configurations_must_exist(tmp_path: Path) -> None:
    config = small_config(kernels=("index_scores",), kernel_configs=tmp_path / "nowhere")
    with pytest.raises(InputError, match="nowhere does not exist"):
        run(config, tmp_path / "out", machine=small_machine())
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_bench_is_refused(
    finished: tuple[Path, dict[str, Any], BenchConfig],
) -> None:
    with pytest.raises(InputError, match="belongs to another configuration"):
        run(small_config(kernels=("planned_attention",)), finished[0], machine=small_machine())
