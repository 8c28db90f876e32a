"""The command line: what exits with which status, and says what where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from page4.experiments import acceptance, cli
from page4.experiments.acceptance import AcceptanceConfig
from page4.experiments.cli import run
from page4.experiments.cli_study import result_folder
from page4.experiments.progress import Reporter
from page4.kernels.errors import InputError
from page4.kvcache.overlay_scales import PrototypeScales

COMMANDS = (
    "acceptance",
    "quant-error",
    "calibrate",
    "capacity",
    "throughput",
    "scales",
    "train",
    "corpus",
    "bench",
    "autotune",
    "generate",
    "info",
    "sm70",
)


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the acceptance study end with an exception."""

    def study(config: AcceptanceConfig, out: Path, progress: Reporter) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(acceptance, "run", study)


@pytest.mark.parametrize("command", ["sm70 predict", "autotune --target sm70"])
def test_who_predicts_is_told_to_install_numba(command: str) -> None:
    program = (
        "import sys; sys.modules['numba'] = None; from page4.experiments.cli import run;"
        f"sys.exit(run({command.split()}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"page4: page4 {command} needs numba: in the repository, pip install -e '.[sm70]'"
    ]


@pytest.mark.parametrize("arguments", [[], ["--help"], *([command, "-h"] for command in COMMANDS)])
def test_help_is_not_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert "Usage: page4" in capsys.readouterr().out


def test_help_does_not_wait_for_pytorch() -> None:
    program = (
        "import sys; from page4.experiments.cli import run; run(['--help']);"
        "sys.exit(bool({'torch', 'numpy', 'matplotlib', 'tokenizers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["acceptence"], "No such command 'acceptence'. Did you mean 'acceptance'?"),
        (["info", "--colour"], "No such option: --colour"),
        (["acceptance", "--seed", "x"], "Invalid value for '--seed'"),
        (["acceptance", "--set", "kernel_configs=nowhere"], "kernel configurations nowhere does not exist"),
        (["acceptance", "--device", "tpu"], "--device must be one of auto, cpu, cuda, got 'tpu'"),
        (["acceptance", "--set", "lenghts=1"], "unknown key 'lenghts' (did you mean 'lengths'?)"),
        (["acceptance", "--set", "arms=[[a, fp16, fp17, 0]]"], "fp17"),
        (["acceptance", "--config", "missing.yaml"], "missing.yaml: No such file or directory"),
        (["acceptance", "--set", "model=no/such/folder"], "no/such/folder"),
        (["quant-error", "--set", "rules=max,median"], "rules[1] must be one of max, percentile, mse"),
        (["train", "--set", "data=no/such/folder"], "no/such/folder"),
        (["capacity", "--set", "geometry=no/such/folder"], "geometry 'no/such/folder' is neither a folder"),
        (["capacity", "--set", "tensor_parallel=3"], "2 KV heads cannot be shared by 3 ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_line_on_standard_error_and_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("page4: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("the scale is nan;\nit must be finite"), "page4: the scale is nan; it must be finite\n"),
        (PermissionError(13, "Permission denied", "results"), "page4: results: Permission denied\n"),
        (OSError(28, "No space left on device"), "page4: writing the results: No space left on device\n"),
    ],
)
def test_what_a_study_refuses_becomes_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(error, monkeypatch)
    assert run(["acceptance"]) == 2
    assert capsys.readouterr().err == line


def test_an_interrupt_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(KeyboardInterrupt(), monkeypatch)
    assert run(["acceptance"]) == 130
    assert capsys.readouterr().err == "page4: interrupted, run the same command to resume\n"


@pytest.mark.parametrize(
    "command", [["generate", "README.md"], ["info"], ["capacity"], ["scales", "verify", "x"]]
)
def test_an_interrupt_promises_nothing_where_nothing_is_kept(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The interrupt comes as the command takes up its work, in a module that each of them calls."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("A text.", encoding="utf-8")

    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    for name in ("generate.continue_text", "info.collect_info", "capacity.run"):
        monkeypatch.setattr(f"page4.experiments.{name}", interrupt)
    monkeypatch.setattr("page4.model.kv_scales.describe_base", interrupt)
    assert run(command) == 130
    assert capsys.readouterr().err == "page4: interrupted\n"


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(ZeroDivisionError("a defect"), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        run(["acceptance"])


def test_a_study_ends_with_table_figures_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}

    def study(config: AcceptanceConfig, out: Path, progress: Reporter) -> dict[str, Any]:
        given.update(config=config, out=out)
        progress.start(total=2)
        progress.advance("half")
        progress.advance("all")
        out.mkdir()
        (out / "table.md").write_text("| a |\n", encoding="utf-8")
        (out / "acceptance.png").touch()
        return {"acceptance": 0.5}

    monkeypatch.setattr(acceptance, "run", study)
    out = tmp_path / "results"
    arguments = ["--quick", "--seed", "7", "--device", "cpu", "--set", "num_prompts=2", "--json"]
    assert run(["acceptance", "--out", str(out), *arguments]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "| a |" in lines
    assert f"figure: {out / 'acceptance.png'}" in lines
    assert json.loads(lines[-1]) == {"acceptance": 0.5}
    assert "acceptance: 2/2" in captured.err
    assert given["out"] == out
    quick = AcceptanceConfig(**AcceptanceConfig.QUICK | {"num_prompts": 2}, seed=7, device="cpu")
    assert given["config"] == quick


def test_a_quick_run_does_not_get_in_the_way_of_the_full_one() -> None:
    assert result_folder(None, "acceptance", quick=False) == Path("results/acceptance")
    assert result_folder(None, "acceptance", quick=True) == Path("results/acceptance-quick")
    assert result_folder(Path("x"), "acceptance", quick=True) == Path("x")


def test_info_ends_with_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["versions"]["torch"]
    assert record["kv_formats"]["fp16"] == 2
    assert record["kv_formats"]["e4m3"] == 1
    assert (record["kv_formats"]["int8"], record["kv_scale_bytes"]["int8"]) == (1, 4)
    assert record["kv_formats"][record["recommended_kv_format"]] == 1
    assert set(record) == {
        "versions",
        "stack",
        "hardware",
        "checkpoint",
        "attention",
        "delta_prefill",
        "prefix",
        "kv_formats",
        "kv_scale_bytes",
        "recommended_kv_format",
        "shipped_scales",
    }


def test_a_warning_of_the_package_is_one_line_without_a_place() -> None:
    shown = cli._format_warning("scales", PrototypeScales, "file.py", 3)
    assert shown == "page4: warning: scales\n"
    assert "file.py:3" in cli._format_warning("old", DeprecationWarning, "file.py", 3)
