"""What holds for the files of the repository as a whole."""

from __future__ import annotations

import itertools
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

from page4.experiments.cli import app
from page4.kvcache import RECOMMENDED

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "kernels",
    "kvcache",
    "model",
    "spec_decode",
    "experiments",
    "notebooks",
    "tests",
    "docs",
    "constraints",
)
SKIPPED = {"__pycache__", ".ipynb_checkpoints"}
MIB = 2**20

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|Users|mnt|tmp|private)/[\w.]")
PACKAGE_INDEX = re.compile(r"--(?:extra-)?index-url|--find-links|--trusted-host")


def repository_files() -> list[Path]:
    """Files in the top folders and at the top itself; environments, caches and results are none of them."""
    nested = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    top = [file for file in ROOT.iterdir() if file.is_file()] + [ROOT / ".ci" / "run"]
    return [file for file in sorted(nested + top) if not SKIPPED & set(file.parts)]


def is_own_text(file: Path) -> bool:
    """Text written for this project: neither others' texts nor the checkpoint."""
    texts = ("prompts", "calibrate/texts")
    data = (*(ROOT / "experiments" / folder for folder in texts), ROOT / "model" / "checkpoint")
    return file.suffix not in (".png", ".safetensors", ".gz", ".xz") and not any(
        file.is_relative_to(d) for d in data
    )


def test_no_file_names_a_path_of_one_machine_or_a_package_index() -> None:
    found = []
    for file in filter(is_own_text, repository_files()):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line) or (PACKAGE_INDEX.search(line) and file != Path(__file__).resolve()):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


@pytest.mark.parametrize("path", ["/home/" + "me/x", "open('/root" + "/a')", "PYTHONPATH=/work" + "/main"])
def test_a_machine_path_is_found(path: str) -> None:
    assert MACHINE_PATH.search(path)


def test_the_repository_stays_small() -> None:
    sizes = {file: file.stat().st_size for file in repository_files()}
    assert sum(sizes.values()) < 48 * MIB
    checkpoint = {file: size for file, size in sizes.items() if file.suffix == ".safetensors"}
    assert sum(checkpoint.values()) <= 40e6
    assert all(size <= 15 * MIB for size in checkpoint.values())


def test_setup_finds_every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {file.parent for layer in FOLDERS[:5] for file in (ROOT / layer).rglob("*.py")}
    expected = {"page4." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(arguments["packages"]) == expected  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "name",
    ["README.md", "CONTRIBUTING.md", "DESIGN.md", "docs/v100.md", "docs/scales.md", "docs/findings.md"],
)
def test_documents_name_commands_targets_and_files_that_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    commands = {command.name for command in (*app.registered_commands, *app.registered_groups)}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`(?:\.venv/bin/)?page4 ([a-z0-9-]+)", text)) <= commands
    assert set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / name).parent / link).exists(), link


def test_findings_rest_on_published_results() -> None:
    named = set(
        re.findall(r"\bresults/([a-z0-9_-]+)", (ROOT / "docs/findings.md").read_text(encoding="utf-8"))
    )
    assert len(named) > 5
    missing = [
        name for name in named if not (ROOT / "experiments/results" / name / "provenance.json").is_file()
    ]
    assert not missing


def test_the_result_in_the_readme_is_that_of_the_committed_study() -> None:
    of_arms = _tables((ROOT / "experiments/results/acceptance/table.md").read_text(encoding="utf-8"))
    result, *_ = _tables(
        (ROOT / "README.md").read_text(encoding="utf-8").partition("## The answer so far")[2]
    )
    e4m3, e2m5 = of_arms[:2]
    assert len(result) == len(e4m3) == len(e2m5) > 0
    for shown, *measured in zip(result, e4m3, e2m5, strict=True):
        known = measured[0] | measured[1]
        assert shown == {name: known[name] for name in shown}


def _tables(markdown: str) -> list[list[dict[str, str]]]:
    """The rows of every table by its header's names."""
    tables = []
    for is_table, lines in itertools.groupby(markdown.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            tables.append([dict(zip(header, row, strict=True)) for row in rows])
    return tables


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_the_package_needs_is_package_data_and_published_results_are_not(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for layer in FOLDERS[:5]:
        (tmp_path / layer).mkdir()
        (tmp_path / layer / "__init__.py").touch()
    place = Path("kernels/configs/nvidia-h200/triton-3.6/page4_attention_gluon.json")
    geometry, result = Path("experiments/geometries/one.yaml"), Path("experiments/results/one/config.yaml")
    for file in (place, geometry, result):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("{}")
    overlays = Path("model/checkpoint-kvscales")
    shutil.copytree(ROOT / overlays, tmp_path / overlays)
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", "built"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    built = tmp_path / "built" / "page4"
    assert (built / place).read_text() == (built / geometry).read_text() == "{}"
    for name in ("e4m3", RECOMMENDED):
        shipped, packed = (_contents(top / overlays / name) for top in (ROOT, built))
        assert packed == shipped and len(packed) == 4
    assert not (built / result).exists()
