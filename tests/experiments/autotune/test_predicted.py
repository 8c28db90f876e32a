"""Tuning for a V100 by prediction: what is tried, what is recorded, and what is not predicted twice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from page4.experiments.autotune import predicted_trials
from page4.experiments.autotune.predicted_config import PredictedTuningConfig
from page4.experiments.autotune.predicted_study import COLUMNS, run
from page4.experiments.autotune.predicted_trials import (
    PredictedTrial,
    best_of,
    fastest_of,
    possible_configs,
    try_predicted,
)
from page4.experiments.autotune.problem import Cell
from page4.experiments.autotune.problems import problems_on
from page4.experiments.autotune.study import plan_cells
from page4.experiments.cli import run as run_command
from page4.experiments.samples import read_samples
from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.predictor.call import v100_stack
from page4.experiments.sm70.step_inputs import attention_inputs
from page4.experiments.sm70.toolchain import side_install
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_dispatch import chosen
from page4.kernels.page4_attention_gluon import GluonConfig
from page4.kernels.tunable import TUNABLE
from page4.kernels.tuning import use_configurations
from page4.kernels.tuning_file import read_tuning_file

SMALL = PredictedTuningConfig(
    kernels=("page4_attention_gluon",),
    requests=(4,),
    rows=(4,),
    heads=((6, 1),),
    kv_formats=("e4m3", "int8"),
    followers=("int8",),
    context=1024,
    topk=64,
)
ON_V100 = problems_on((7, 0))
PATH = Path("v100/triton-3.6/page4_attention_gluon.json")


def trial(config: Any, us: float, registers: int, code: str = "") -> PredictedTrial:
    return PredictedTrial(config, "predicted", us, registers, code=code)


class Inventor:
    """Trials without a compiler: the default, one that is 10 % faster and one with fewer registers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Cell, dict[str, PredictedTrial], Any]] = []

    def __call__(
        self, cell: Cell, known: Mapping[str, PredictedTrial], only: Any
    ) -> tuple[Any, list[PredictedTrial]]:
        self.calls.append((cell, dict(known), only))
        default, configs = possible_configs(cell, SMALL)
        if only is not None:
            return default, [trial(default, 20.0, 168, "a"), trial(only, 19.0, 100, "b")]
        fast, small = configs[1:3]
        return default, [
            trial(default, 20.0, 168, "a"),
            trial(fast, 18.0, 160, "b"),
            trial(small, 19.0, 100, "c"),
        ]


@pytest.mark.parametrize("kernel", ["page4_attention_gluon", "index_scores_triton", "qsa_prepare_triton"])
def test_candidates_are_those_of_a_v100_with_the_default_first(kernel: str) -> None:
    cells = plan_cells(dataclasses.replace(SMALL, kernels=(kernel,)), ON_V100)
    default, configs = possible_configs(cells[0], SMALL)
    assert configs[0] == default
    assert len(set(configs)) == len(configs) > 1
    if kernel == "page4_attention_gluon":
        assert {config.instruction for config in configs} == {"mma884"}
        # A list of fewer than 96 blocks has no more turns than that, whatever it has room for.
        assert max(config.splits for config in configs[1:]) <= 12


def test_splits_that_nearly_tie_are_left_out() -> None:
    cell = plan_cells(SMALL, ON_V100)[0]
    _, few = possible_configs(cell, dataclasses.replace(SMALL, splits_step=3.0))
    _, many = possible_configs(cell, dataclasses.replace(SMALL, splits_step=1.0))
    assert set(few) < set(many)


def test_tiles_of_a_v100_have_eight_members() -> None:
    # 24 members are 3 tiles; a third of the heads is one, which padding to 16 would hide.
    cell = plan_cells(SMALL, ON_V100)[0]
    assert {config.head_splits for config in possible_configs(cell, SMALL)[1]} == {1, 2, 3}


def test_ties_go_to_fewer_registers() -> None:
    trials = [trial("fast", 10.0, 168), trial("small", 11.4, 96), trial("slow", 11.6, 64)]
    best, fastest = best_of(trials), fastest_of(trials)
    assert best is not None and fastest is not None
    assert (best.config, fastest.config) == ("small", "fast")
    assert best_of([PredictedTrial("x", "fails")]) is None


def test_what_is_recorded_is_marked_and_used_on_a_v100(tmp_path: Path) -> None:
    inventor = Inventor()
    summary = run(SMALL, tmp_path / "out", try_cell=inventor)
    assert summary["measured"] is False
    assert summary["tuned"] == 2
    assert summary["files"] == [PATH.as_posix()]
    file = tmp_path / "out" / "configs" / PATH
    entries = json.loads(file.read_text())["entries"]
    assert all("predicted" in entry and "measured" not in entry for entry in entries)
    assert [(entry["median_us"], entry["default_us"]) for entry in entries] == [(19.0, 20.0)] * 2
    (step, _) = SMALL.steps
    with use_configurations(tmp_path / "out" / "configs"), v100_stack():
        choice = chosen(attention_inputs(step))
    entries_read = read_tuning_file(file, TUNABLE["page4_attention_gluon"]).entries
    assert choice.source == "predicted exact"
    assert choice.config in {entry.config for entry in entries_read.values()}
    assert "nothing was measured" in (tmp_path / "out" / "table.md").read_text().lower()


def test_formats_that_follow_get_what_is_best_for_the_first_one(tmp_path: Path) -> None:
    inventor = Inventor()
    run(SMALL, tmp_path / "out", try_cell=inventor)
    (first, _, none), (second, _, only) = inventor.calls
    assert (first.step.kv_format, second.step.kv_format) == ("e4m3", "int8")
    assert none is None
    assert only == possible_configs(first, SMALL)[1][2]


def test_known_trials_are_offered_again_and_a_finished_folder_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(SMALL, out, try_cell=Inventor())
    before = (out / "trials.csv").read_bytes()
    again = Inventor()
    run(SMALL, out, try_cell=again)
    assert [sorted(known) for _, known, _ in again.calls] == [["a", "b", "c"], ["a", "b"]]
    assert (out / "trials.csv").read_bytes() == before


def test_changed_trials_replace_those_of_their_cell(tmp_path: Path) -> None:
    out, inventor = tmp_path / "out", Inventor()
    run(SMALL, out, try_cell=inventor)

    def slower(cell: Cell, known: Mapping[str, PredictedTrial], only: Any) -> Any:
        default, trials = inventor(cell, known, only)
        return default, [dataclasses.replace(t, us=50.0, code=t.code + "2") for t in trials]

    run(SMALL, out, try_cell=slower)
    rows = read_samples(out / "trials.csv", COLUMNS)
    assert {row["predicted_us"] for row in rows} == {50.0}
    assert len(rows) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": ("softmax",)}, "cannot be tuned"),
        ({"kernels": ("page4_attention_triton",)}, "not tuned for a V100"),
        ({"requests": ()}, "requests must name"),
        ({"kept_tiles": 0}, "kept_tiles must be at least 1"),
        ({"splits_step": 0.5}, "splits_step must be at least 1"),
        ({"followers": ("e4m3",)}, "cannot follow"),
        ({"rows": (2000,)}, "do not fit"),
    ],
)
def test_what_cannot_be_tuned_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_another_target_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["autotune", "all", "--target", "sm75"]) == 2
    assert capsys.readouterr().err == "page4: --target predicts for sm70 (a V100), got 'sm75'\n"


def test_real_trials_are_predicted_once() -> None:
    config = dataclasses.replace(SMALL, kernels=("qsa_prepare_triton",), kv_formats=("e4m3",), followers=())
    (cell,) = plan_cells(config, ON_V100)
    compiler = Compiler(side_install())
    try:
        default, trials = try_predicted(cell, {}, None, compiler, config, set())
        known = {t.code: t for t in trials}
        again = try_predicted(cell, known, None, _NoCompiler(), config, set())
        # A format may follow one for which the rule is best.
        alone = try_predicted(cell, known, default, _NoCompiler(), config, set())
    finally:
        compiler.close()
    assert alone == (default, trials[:1])
    assert trials[0].config == default
    assert trials[0].us is not None and trials[0].us > 0
    assert trials[0].registers is not None and trials[0].registers > 16
    assert again == (default, trials)


@pytest.mark.parametrize("spilling_default", [False, True])
def test_what_spills_is_never_recorded(spilling_default: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = plan_cells(dataclasses.replace(SMALL, kv_formats=("e4m3",), followers=()), ON_V100)
    spills = GluonConfig(4, 64, 4, 2, "mma884", 1)  # tiles of 16 tokens a warp, at 64 dimensions a warp
    room = dataclasses.replace(spills, tile_tokens=32)
    default, other = (spills, room) if spilling_default else (room, spills)
    predicted: list[Any] = []

    def quick_where_it_spills(kind: str, step: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cell.problem, "run", lambda inputs, config: predicted.append(config))
            call(None)
        us = 10.0 if predicted[-1] == spills else 20.0
        prediction = SimpleNamespace(us=us, static=SimpleNamespace(registers=100))
        return [SimpleNamespace(kernel="attention", prediction=prediction)], None

    monkeypatch.setattr(predicted_trials, "predict_call", quick_where_it_spills)
    monkeypatch.setattr(predicted_trials, "possible_configs", lambda *_: (default, [default, other]))
    compiler = Compiler(side_install())
    try:
        _, trials = try_predicted(cell, {}, None, compiler, SMALL, set())
        by_code = {trial.code: trial for trial in trials if trial.code}
        again = try_predicted(cell, by_code, None, _NoCompiler(), SMALL, set())
    finally:
        compiler.close()
    outcomes = {trial.config: trial.outcome for trial in trials}
    assert outcomes == {spills: "spills", room: "predicted"}
    # A default has a time all the same: the others are held against it.
    assert predicted == ([spills, room] if spilling_default else [room])
    assert {trial.config: trial.us for trial in trials}[spills] == (10.0 if spilling_default else None)
    best, fastest = best_of(trials), fastest_of(trials)
    assert best is not None and best.config == room and fastest is best
    assert again == (default, trials)


class _NoCompiler(Compiler):
    """Fails when it is used."""

    def __init__(self) -> None:
        pass

    def compile(self, job: Any) -> Any:
        raise AssertionError("it was compiled already")
