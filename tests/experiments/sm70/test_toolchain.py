"""The Triton that compiles for sm_70: where it is looked for, and what its tools say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from page4.experiments.sm70 import toolchain
from page4.experiments.sm70.toolchain import FOLDER_VARIABLE, VERSION, Toolchain, installed, side_install
from page4.kernels.errors import InputError


def unpack(folder: Path, tags: str) -> None:
    """What pip leaves of a wheel's metadata."""
    wheel = folder / f"triton-{VERSION}.dist-info" / "WHEEL"
    wheel.parent.mkdir(parents=True)
    wheel.write_text(f"Wheel-Version: 1.0\n{tags}\n")


def test_a_missing_one_is_one_line_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(toolchain, "DEFAULT_FOLDER", tmp_path / ".sm70")
    with pytest.raises(InputError, match="make sm70") as error:
        side_install()
    assert "\n" not in str(error.value)
    assert f"triton=={VERSION}" in str(error.value) and FOLDER_VARIABLE in str(error.value)


def test_the_variable_wins_over_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 12))
    for name in ("default", "other"):
        unpack(tmp_path / name, "Tag: cp312-cp312-manylinux_2_28_x86_64")
    monkeypatch.setattr(toolchain, "DEFAULT_FOLDER", tmp_path / "default")
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert side_install() == Toolchain(tmp_path / "default", VERSION)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "other"))
    assert side_install() == Toolchain(tmp_path / "other", VERSION)


def test_one_of_another_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack(tmp_path, "Tag: cp39-cp39-manylinux_2_28_x86_64")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(InputError, match="not for this Python"):
        side_install()


@pytest.mark.parametrize("found", [side_install, installed])
def test_its_tools_are_there(found: object) -> None:
    there = found()  # type: ignore[operator]
    for name in ("nvdisasm", "cuobjdump", "ptxas"):
        assert there.tool(name).is_file()


def test_what_is_no_binary_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        side_install().disassemble(b"no cubin")
