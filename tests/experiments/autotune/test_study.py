"""`page4 autotune` on real kernels in the interpreter: what it tries, records, resumes and merges."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from page4.experiments.autotune import AutotuneConfig, run, study
from page4.experiments.autotune.choice import Trial
from page4.experiments.autotune.compiling import Compiled
from page4.experiments.autotune.problem import Bench, Candidates, Cell
from page4.experiments.autotune.problems import PROBLEMS
from page4.experiments.autotune.record import TRIAL_COLUMNS, Result, record, results, table, trial_rows
from page4.experiments.autotune.shipped import entry_rows, plot_gains, shipped_files
from page4.experiments.autotune.study import plan_cells, try_all
from page4.experiments.cli import run as run_command
from page4.experiments.kernel_cases import attention_copies
from page4.experiments.samples import read_samples
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_dispatch import chosen, page4_attention
from page4.kernels.page4_attention_triton import AttentionConfig
from page4.kernels.tunable import TUNABLE, AttentionKey, PrepareKey, ScoresKey
from page4.kernels.tuning import triton_version, use_configurations
from page4.kernels.tuning_file import Entry, TuningFile, read_tuning_file, tuning_path
from tests.experiments.autotune.cpu_machine import (
    CPU,
    NEEDS_CPU,
    OTHER_SHAPE,
    SHAPE,
    Clock,
    cpu_machine,
    small_cell,
    small_config,
    small_step,
)

KERNEL = TUNABLE["page4_attention_triton"]
PATH = tuning_path(KERNEL.name, "cpu", triton_version())
DEFAULT = AttentionConfig(1, 64, 4, 2)


@NEEDS_CPU
def test_a_search_records_a_configuration_that_a_study_then_uses(tmp_path: Path) -> None:
    out = tmp_path / "out"
    clock = Clock()
    config = small_config()
    summary = run(config, out, machine=cpu_machine(clock))
    rows = read_samples(out / "trials.csv", TRIAL_COLUMNS)
    assert summary["tuned"] == 1 and summary["left"] == 0
    assert summary["trials"] == {"timed": len(rows), "spills": 0, "fails": 0, "wrong": 0}
    assert clock.calls == len(rows) > 10
    assert sum(row["default"] for row in rows) == 1
    assert {path.name for path in out.iterdir()} == {
        ".lock",
        "config.yaml",
        "configs",
        "inputs.json",
        "provenance.json",
        "summary.json",
        "table.md",
        "trials.csv",
    }

    (entry,) = read_tuning_file(out / "configs" / PATH, KERNEL).entries.values()
    assert entry.conditions == {"context": 20, "overlap": 0.5}
    assert entry.median_us <= 1.03 * min(row["median_us"] for row in rows) + 1e-3
    (step,) = config.steps
    inputs = attention_copies(step, CPU)[0]
    with use_configurations(out / "configs") as configurations:
        choice = chosen(inputs)
        assert (choice.config, choice.source) == (entry.config, "exact")
        page4_attention(inputs)
        assert configurations.record()["files"].keys() == {PATH.as_posix()}

    # The same command has nothing left to do.
    before = (out / "configs" / PATH).read_bytes()
    again = Clock()
    assert run(config, out, machine=cpu_machine(again)) == summary
    assert again.calls == 0
    assert (out / "configs" / PATH).read_bytes() == before


@NEEDS_CPU
def test_a_budget_does_the_important_steps_first_and_a_later_run_the_rest(tmp_path: Path) -> None:
    config = small_config(shapes=(SHAPE, OTHER_SHAPE))

    clock = Clock()
    # The budget ends with the first measurement; until then no time passes.
    machine = cpu_machine(clock, now=lambda: 1000.0 if clock.calls else 0.0)
    first = run(dataclasses.replace(config, seconds=900.0), tmp_path, machine=machine)
    assert (first["tuned"], first["left"]) == (1, 1)
    assert "1 of 2 left: run again to go on" in (tmp_path / "table.md").read_text()
    trials = (tmp_path / "trials.csv").read_text()
    second = run(config, tmp_path, machine=cpu_machine())
    assert (second["tuned"], second["left"]) == (2, 0)
    assert (tmp_path / "trials.csv").read_text().startswith(trials)
    assert len(read_tuning_file(tmp_path / "configs" / PATH, KERNEL).entries) == 2


@NEEDS_CPU
def test_what_spills_fails_or_is_wrong_is_not_timed_but_the_default_is() -> None:
    cell = small_cell()
    clock = Clock()
    bench = Bench(cell, cpu_machine(copies=1), seed=0)
    one, two, three = (AttentionConfig(splits, 16, 4, 1) for splits in (1, 2, 3))
    compiled = {
        DEFAULT: Compiled(spills=8),
        one: Compiled(spills=4),
        two: Compiled("boom"),
        three: Compiled(),
    }
    trials = try_all(compiled, DEFAULT, bench, cpu_machine(clock))
    assert [trial.outcome for trial in trials] == ["timed", "spills", "fails", "timed"]
    assert [trial.note for trial in trials] == ["", "4 registers", "boom", ""]
    assert clock.calls == 2


@NEEDS_CPU
def test_a_wrong_result_is_not_timed() -> None:
    bench = Bench(small_cell(), cpu_machine(copies=1), seed=0)
    bench.inputs[0].v_pages.bitwise_xor_(0x80)  # V of the other sign than the expected results are for
    clock = Clock()
    (trial,) = try_all({DEFAULT: Compiled()}, DEFAULT, bench, cpu_machine(clock))
    assert (trial.outcome, clock.calls) == ("wrong", 0)
    assert trial.note.startswith("the output is off by")


@pytest.mark.parametrize("rows", [1, 3, 8, 20])
@pytest.mark.parametrize("context", [30, 71, 5000])
def test_a_cell_is_recorded_under_the_key_of_its_inputs(rows: int, context: int) -> None:
    cell = small_cell(rows=rows, context=context)
    assert cell.key == AttentionKey.of(attention_copies(cell.step, CPU)[0])


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("context", [30, 71])
def test_the_other_kernels_are_recorded_under_the_keys_of_their_inputs(rows: int, context: int) -> None:
    step = small_step(rows=rows, context=context)
    (scores,) = PROBLEMS["index_scores_triton"].copies(step, CPU, 0, 1)
    key = ScoresKey.of(scores.index_q, scores.groups, scores.scores)
    assert PROBLEMS["index_scores_triton"].key(step) == key
    (prepare,) = PROBLEMS["qsa_prepare_triton"].copies(step, CPU, 0, 1)
    expected = PrepareKey.of(prepare.q_gate, prepare.k, prepare.index, prepare.storage)
    assert PROBLEMS["qsa_prepare_triton"].key(step) == expected


def test_cells_are_in_the_order_of_importance_and_one_for_a_key() -> None:
    longer = (*SHAPE[:5], 1000, SHAPE[6])  # another key for scores and attention, not for the prepare kernel
    config = small_config(kernels=(), shapes=(SHAPE, longer), kv_formats=("fp16", "int8"))
    found = [(cell.kernel, cell.step.context, cell.step.kv_format) for cell in plan_cells(config)]
    assert found == [
        ("page4_attention_gluon", 20, "fp16"),
        ("page4_attention_triton", 20, "fp16"),
        ("index_scores_triton", 20, "fp16"),
        ("qsa_prepare_triton", 20, "fp16"),
        ("page4_attention_triton", 20, "int8"),
        ("qsa_prepare_triton", 20, "int8"),
        ("page4_attention_gluon", 1000, "fp16"),
        ("page4_attention_triton", 1000, "fp16"),
        ("index_scores_triton", 1000, "fp16"),
        ("page4_attention_triton", 1000, "int8"),
    ]


def test_every_tunable_kernel_is_a_problem() -> None:
    assert list(PROBLEMS) == list(TUNABLE)


def test_kernels_are_not_tried_for_formats_that_they_do_not_read() -> None:
    def possible(kernel: str, kv_format: str) -> bool:
        return PROBLEMS[kernel].possible(small_step(kv_format=kv_format))

    assert possible("page4_attention_gluon", "e4m3") and possible("page4_attention_triton", "int8")
    assert not possible("page4_attention_gluon", "int8")
    for kernel in ("page4_attention_gluon", "page4_attention_triton", "qsa_prepare_triton"):
        assert not possible(kernel, "fp32")


@pytest.mark.parametrize(
    ("capability", "tried"),
    [
        ((7, 0), {"fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8"}),
        ((7, 5), set()),
        ((8, 0), {"fp16", "e4m3", "e5m2", "e3m4", "e2m5"}),
        ((9, 0), {"fp16", "e4m3", "e5m2", "e3m4", "e2m5"}),
    ],
)
def test_gluon_is_tried_for_the_formats_that_it_reads_on_a_gpu(
    capability: tuple[int, int], tried: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned: list[str] = []

    def stop(cells: Sequence[Cell], *args: Any) -> Iterator[Any]:
        planned.extend(cell.step.kv_format for cell in cells)
        return iter(())

    monkeypatch.setattr(study, "device_capability", lambda device: capability)
    monkeypatch.setattr(study, "_tune", stop)
    formats = ("fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8")
    config = small_config(kernels=("page4_attention_gluon", "qsa_prepare_triton"), kv_formats=formats)
    run(config, tmp_path / "out", machine=cpu_machine())
    assert planned.count("int8") == 1 + ("int8" in tried)
    assert {name for name in formats if planned.count(name) == 2} == tried


@NEEDS_CPU
@pytest.mark.parametrize("kernel", ["index_scores_triton", "qsa_prepare_triton"])
def test_all_candidates_of_the_other_kernels_are_right_and_errors_are_found(kernel: str) -> None:
    cell = small_cell(kernel, context=45, rows=5, kv_format="e4m3", index_dim=32)
    found = Candidates.of(cell, cpu_machine(), seed=0)
    bench = Bench(cell, cpu_machine(copies=1), seed=0)
    some = found.configs[::16] if kernel == "index_scores_triton" else found.configs
    assert [bench.difference(config) for config in some] == [None] * len(some)
    (inputs,) = bench.inputs
    if kernel == "index_scores_triton":
        inputs.index_q.mul_(1.5)
        assert "a score is off by" in (bench.difference(found.default) or "")
    else:
        inputs.v.mul_(1.5)
        assert "V differs in" in (bench.difference(found.default) or "")


def rows_of(cell: Cell, splits: int, day: str = "2026-11-29") -> list[dict[str, object]]:
    trials = [Trial(DEFAULT, "timed", 9.0), Trial(AttentionConfig(splits, 16, 4, 1), "timed", 6.0)]
    return trial_rows(cell, trials, DEFAULT, day)


def test_entries_of_other_keys_stay_and_equal_keys_are_replaced(tmp_path: Path) -> None:
    old, other, new = small_cell(), small_cell(requests=7), small_cell()
    record(tmp_path, results([old, other], [*rows_of(old, 2), *rows_of(other, 3)]), "cpu", triton_version())
    record(tmp_path, results([new], rows_of(new, 4)), "cpu", triton_version())
    entries = read_tuning_file(tmp_path / PATH, KERNEL).entries
    assert {key.groups: entry.config.splits for key, entry in entries.items()} == {2: 4, 7: 3}
    assert entries[new.key] == Entry(
        new.key, AttentionConfig(4, 16, 4, 1), 6.0, 9.0, "2026-11-29", {"context": 71, "overlap": 0.5}
    )


def test_of_cells_with_one_key_the_first_counts(tmp_path: Path) -> None:
    important, later = small_cell(overlap=0.9), small_cell(overlap=0.1)
    rows = [*rows_of(later, 3), *rows_of(important, 2)]
    record(tmp_path, results([important, later], rows), "cpu", triton_version())
    (entry,) = read_tuning_file(tmp_path / PATH, KERNEL).entries.values()
    assert (entry.config.splits, entry.conditions["overlap"]) == (2, 0.9)


def test_a_default_that_cannot_run_leaves_no_entry_and_is_said(tmp_path: Path) -> None:
    cell = small_cell()
    trials = [Trial(DEFAULT, "fails", note="boom"), Trial(AttentionConfig(2, 16, 4, 1), "timed", 6.0)]
    found = results([cell], trial_rows(cell, trials, DEFAULT, "2026-11-29"))
    assert found == [Result(cell, None, {"timed": 1, "spills": 0, "fails": 1, "wrong": 0})]
    assert record(tmp_path, found, "cpu", triton_version()) == []
    assert "the default configuration cannot run" in table(found)


def test_the_table_says_what_was_gained_and_what_was_skipped() -> None:
    cell = small_cell()
    trials = [
        Trial(DEFAULT, "timed", 9.0),
        Trial(AttentionConfig(2, 16, 4, 1), "timed", 6.0),
        Trial(AttentionConfig(3, 16, 4, 1), "spills", note="8 registers"),
    ]
    line = table(results([cell], trial_rows(cell, trials, DEFAULT, "2026-11-29"))).splitlines()[-1]
    assert line == (
        "| page4_attention_triton | 2 x 3, 6/2 x 32 | 71 | 0.5 | e4m3 "
        "| splits 2, tile_tokens 16, num_warps 4, num_stages 1 | 6.00 | 9.00 | 1.50x | 1 spills |"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": ("softmax",)}, "kernel 'softmax' cannot be tuned"),
        ({"shapes": ()}, "shapes and kv_formats must each name at least one"),
        ({"shapes": ((1, 9, 2, 1, 32, 4, 0.5),)}, "9 rows do not fit into a context of 4 tokens"),
        ({"kv_formats": ("fp4",)}, "fp4"),
        ({"seconds": -1.0}, "seconds must be at least 0"),
        ({"replays": 0}, "replays must be at least 1"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small_config(**changes)


def test_a_folder_belongs_to_what_is_asked_and_not_to_how_long_it_may_take(tmp_path: Path) -> None:
    config = small_config(seconds=3.0, processes=2, configs=tmp_path)
    assert config.question() == small_config(processes=0)
    assert config.question() != small_config(processes=0, seed=1)


def test_nothing_to_tune_is_refused(tmp_path: Path) -> None:
    config = small_config(kernels=("page4_attention_gluon",), kv_formats=("int8",))
    with pytest.raises(InputError, match="none of these kernels reads any of these KV formats"):
        run(config, tmp_path / "out", machine=cpu_machine())
    assert not (tmp_path / "out").exists()


def test_default_shapes_begin_with_the_goals() -> None:
    goals = {(1, 1, 6, 1), (1, 4, 6, 1), (4, 4, 24, 2), (16, 4, 24, 2), (64, 4, 6, 1), (64, 4, 24, 2)}
    shapes = AutotuneConfig().shapes
    assert {shape[:4] for shape in shapes[:6]} == goals
    assert {shape[5:] for shape in shapes[:6]} == {(32768, 0.9)}
    assert len(AutotuneConfig().steps) == 2 * len(shapes)


@NEEDS_CPU
def test_without_a_gpu_the_command_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["autotune", "all", "--quick"]) == 2
    assert capsys.readouterr().err == (
        "page4: tuning measures on a CUDA GPU, and PyTorch sees none; --show needs none\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_command_refuses_other_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["softmax"], ["softmax", "--show"]):
        assert run_command(["autotune", *arguments]) == 2
        assert "kernel 'softmax' cannot be tuned; choose one of page4_" in capsys.readouterr().err


def test_a_folder_is_listed_entry_by_entry(tmp_path: Path) -> None:
    cell = small_cell()
    (path,) = record(tmp_path, results([cell], rows_of(cell, 2)), "cpu", "3.6")
    (file,) = shipped_files(tmp_path)
    assert isinstance(file, TuningFile) and file.gpu == "cpu"
    (row,) = entry_rows(file)
    assert "groups 2" in row["call"] and "kv_format e4m3" in row["call"]
    assert (row["configuration"].startswith("splits 2, "), row["us"]) == (True, "6.0")
    (axes,) = plot_gains([file]).axes
    (entry,) = file.entries.values()
    (points,) = [line for line in axes.lines if line.get_label() == "cpu, measured"]
    assert list(points.get_xdata()) == [entry.default_us / entry.median_us]
    assert [label.get_text() for label in axes.get_yticklabels()] == [file.kernel.name]
    path.rename(path.with_name("softmax.json"))
    with pytest.raises(InputError, match="'softmax' cannot be tuned"):
        shipped_files(tmp_path)


def test_show_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["autotune", "--show"]) == 0
    assert all(f"{file.kernel.name}, {file.gpu}" in capsys.readouterr().out for file in shipped_files()[:1])


def test_trials_are_json_that_names_every_field() -> None:
    row = rows_of(small_cell(), 2)[1]
    assert json.loads(str(row["config"])) == {
        "splits": 2,
        "tile_tokens": 16,
        "num_warps": 4,
        "num_stages": 1,
    }
    assert small_step().topk == 6  # the steps of these tests select few blocks, so that lists are short
