"""Studies as the notebooks find them: read where they are finished, measured where they are not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest

from page4.experiments.finished_study import is_finished, read_config, read_or_measure
from page4.experiments.result_folder import ResultFolder
from page4.kernels.errors import InputError


@dataclasses.dataclass(frozen=True)
class Config:
    """A study of one number."""

    size: int = 100

    QUICK: ClassVar[dict[str, Any]] = {"size": 10}


class Study:
    """Counts how often it is run; what it measures is its size."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, config: Config, out: Path) -> dict[str, Any]:
        self.runs += 1
        summary = {"size": config.size}
        with ResultFolder(out, config) as results:
            results.write_json("summary.json", summary)
        return summary


def test_a_finished_study_is_read_and_not_measured_again(tmp_path: Path) -> None:
    study = Study()
    study(Config(), tmp_path / "full")
    assert read_or_measure(Config, study, tmp_path / "full") == Config(100)
    assert study.runs == 1


def test_where_there_is_none_a_quick_one_is_measured_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_or_measure(Config, Study(), tmp_path / "new") == Config(10)
    said = capsys.readouterr().out
    assert said == f"{tmp_path / 'new'} holds no finished study: a quick one is measured there\n"
    assert is_finished(tmp_path / "new")


def test_overrides_are_settings_of_the_quick_study(tmp_path: Path) -> None:
    assert read_or_measure(Config, Study(), tmp_path / "new", ["size=3"]) == Config(3)
    assert read_config(Config, tmp_path / "new") == Config(3)


def test_overrides_do_not_replace_another_study(tmp_path: Path) -> None:
    Study()(Config(), tmp_path / "full")
    with pytest.raises(InputError, match=r"belongs to another configuration .*size"):
        read_or_measure(Config, Study(), tmp_path / "full", ["size=3"])
    assert read_config(Config, tmp_path / "full") == Config(100)


def test_a_folder_without_a_study_has_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none holds no finished study; name a result folder"):
        read_config(Config, tmp_path / "none")
