"""Provenance names versions, source and command, and no path of the machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from page4.experiments import provenance
from page4.experiments.provenance import collect_provenance, command_line, package_versions


def test_the_command_is_kept_without_machine_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [
        str(tmp_path / "bin" / "page4"),
        "acceptance",
        "--out",
        str(tmp_path / "results" / "a b"),
        "--set=model=" + str(tmp_path.parent / "checkpoint"),
        "--set",
        "lengths=1,2",
        "--config",
        "../study.yaml",
    ]
    expected = (
        "page4 acceptance --out 'results/a b' --set=model=checkpoint --set lengths=1,2 --config ../study.yaml"
    )
    assert command_line(command) == expected


def test_versions_tell_what_is_missing() -> None:
    versions = package_versions()
    assert versions["torch"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions["python"] or "")
    assert "triton" in versions


def test_the_record_names_source_and_hardware() -> None:
    record = collect_provenance()
    assert re.fullmatch(r"[0-9a-f]{64}", record["source"]["code_sha256"])
    assert record["hardware"]["cpu_count"] >= 1


def test_an_archive_of_a_commit_knows_which_one_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        run = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()

    root = Path(provenance.__file__).resolve().parent.parent
    for name in (".gitattributes", ".git_archival.txt"):
        shutil.copy(root / name, tmp_path)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    git("archive", "--output=one.tar", "HEAD")
    with tarfile.open(tmp_path / "one.tar") as archive:
        archive.extractall(tmp_path / "archive", filter="data")
    monkeypatch.setattr(provenance, "_root", lambda: tmp_path / "archive")
    assert provenance.source_version()["commit"] == git("rev-parse", "HEAD")
    assert provenance.source_version()["dirty"] is None
    shutil.copy(root / ".git_archival.txt", tmp_path / "archive")  # not from an archive: nothing is filled in
    assert provenance.source_version()["commit"] is None
