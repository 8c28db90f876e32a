"""A result folder belongs to one configuration and to one process at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure
from PIL import Image

from page4.experiments.result_folder import ResultFolder
from page4.kernels.errors import InputError


@dataclass(frozen=True)
class Part:
    rate: float = 0.5


@dataclass(frozen=True)
class Study:
    lengths: tuple[int, ...] = (1, 2)
    kv_format: str = "fp16"
    part: Part = field(default_factory=Part)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_the_configuration_is_there_from_the_start_and_can_be_read_again(tmp_path: Path) -> None:
    with ResultFolder(tmp_path / "a" / "b", Study()) as folder:
        assert yaml.safe_load((folder.path / "config.yaml").read_text()) == {
            "lengths": [1, 2],
            "kv_format": "fp16",
            "part": {"rate": 0.5},
        }


def test_the_same_study_is_resumed(tmp_path: Path) -> None:
    for length in (1, 2):
        with ResultFolder(tmp_path, Study(), {"checkpoint": "abc"}) as folder:
            samples = folder.samples({"length": int, "accepted": int}, key=("length",))
            assert len(samples) == length - 1
            samples.add([{"length": length, "accepted": 0}])
    assert (tmp_path / "samples.csv").read_text() == "length,accepted\n1,0\n2,0\n"


@pytest.mark.parametrize(
    ("study", "inputs", "keys"),
    [
        (Study(kv_format="e4m3"), {"checkpoint": "abc"}, "differs in kv_format"),
        (Study(lengths=(1,), part=Part(0.25)), {"checkpoint": "abc"}, "differs in lengths, part.rate"),
        (Study(), {"checkpoint": "xyz"}, "differs in checkpoint"),
        (Study(), {}, "differs in checkpoint"),
    ],
)
def test_another_study_is_refused_and_changes_nothing(
    tmp_path: Path, study: Study, inputs: dict[str, str], keys: str
) -> None:
    with ResultFolder(tmp_path, Study(), {"checkpoint": "abc"}):
        pass
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(InputError, match=keys), ResultFolder(tmp_path, study, inputs):
        pytest.fail("the folder belongs to another study")
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(InputError, match="is not empty and holds no config"),
        ResultFolder(tmp_path, Study()),
    ):
        pass
    assert names(tmp_path) == {"thesis.tex"}


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(InputError, match="is a file"), ResultFolder(tmp_path / "out", Study()):
        pass


def test_a_damaged_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [1", encoding="utf-8")
    with pytest.raises(InputError, match="no readable config"), ResultFolder(tmp_path, Study()):
        pass


def test_an_interrupt_before_the_configuration_leaves_a_folder_that_can_be_used(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "inputs.json").write_text("{}", encoding="utf-8")
    with ResultFolder(tmp_path, Study()):
        assert (tmp_path / "config.yaml").exists()


def test_what_killed_processes_were_writing_is_removed(tmp_path: Path) -> None:
    """Before the configuration was there, and after."""
    (tmp_path / ".inputs.partial-ab_12345.json").write_text("{")
    with ResultFolder(tmp_path, Study()):
        pass
    (tmp_path / ".samples.partial-0123abcd.csv").write_text("a,")
    (tmp_path / ".mine.csv").touch()
    with ResultFolder(tmp_path, Study()):
        pass
    assert names(tmp_path) == {".lock", "config.yaml", "inputs.json", "provenance.json", ".mine.csv"}


@pytest.mark.parametrize("record", ["", "[]", '{"runs": 5}', '{"runs": "abc"}', "[" * 10**5])
def test_a_damaged_record_is_refused(tmp_path: Path, record: str) -> None:
    with ResultFolder(tmp_path, Study()):
        pass
    (tmp_path / "provenance.json").write_text(record)
    with pytest.raises(InputError, match="is not the record of a study"), ResultFolder(tmp_path, Study()):
        pass


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    holder = (
        "import fcntl, sys\n"
        f"lock = open({str(tmp_path / '.lock')!r}, 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="in use by another process"), ResultFolder(tmp_path, Study()):
            pass
        process.communicate()
    with ResultFolder(tmp_path, Study()):
        pass


def test_figures_and_tables_are_written_whole(tmp_path: Path) -> None:
    with ResultFolder(tmp_path, Study()) as folder:
        figure = folder.write_figure("figure.png", Figure())
        table = folder.write_csv("table.csv", [{"a": 1, "b": None, "unused": 2}], ["a", "b"])
    assert figure.read_bytes().startswith(b"\x89PNG")
    with Image.open(figure) as image:
        assert image.mode == "P", "a palette"
    assert table.read_text() == "a,b\n1,\n"
    assert names(tmp_path) == {
        ".lock",
        "config.yaml",
        "inputs.json",
        "provenance.json",
        "figure.png",
        "table.csv",
    }


def test_provenance_lists_every_run_also_those_that_were_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ResultFolder(tmp_path, Study(), {"checkpoint": "abc"}):
        raise KeyboardInterrupt
    with ResultFolder(tmp_path, Study(), {"checkpoint": "abc"}) as folder:
        record = json.loads(folder.finish(seconds=3.5).read_text())
    assert record["inputs"] == {"checkpoint": "abc"}
    assert len(record["config_hash"]) == 16
    first, second = record["runs"]
    assert first["finished"] is None
    assert second["finished"] >= second["started"] >= first["started"]
    assert second["seconds"] == 3.5
    assert first["versions"] == second["versions"]


def test_a_damaged_provenance_is_refused(tmp_path: Path) -> None:
    with ResultFolder(tmp_path, Study()):
        pass
    (tmp_path / "provenance.json").write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="not the record of a study"), ResultFolder(tmp_path, Study()):
        pass
