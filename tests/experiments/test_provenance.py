"""Provenance names versions, source and command, and no path of the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
