"""Files of a prefix cache: whole, checked, for the model that wrote them, and for one process at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from page4.kernels.errors import InputError
from page4.kvcache.file_tier import FileTier

IDENTITY = {"model": "a", "cache": "e4m3"}
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
DATA = torch.arange(1000, dtype=torch.int64).view(torch.uint8)


def written(folder: Path, **identity: str) -> Path:
    """A folder with one group, closed; its file."""
    tier = FileTier(folder, IDENTITY | identity)
    tier.write(KEY, 3, DATA)
    tier.close()
    return folder / f"{KEY.hex()}.safetensors"


def test_groups_survive_a_restart(tmp_path: Path) -> None:
    written(tmp_path)
    tier = FileTier(tmp_path, IDENTITY)
    assert KEY in tier and OTHER not in tier
    found = tier.read(KEY)
    assert found is not None
    assert found[0] == 3 and torch.equal(found[1], DATA)
    assert (tier.bytes_read, tier.corrupt) == (8000, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "b"}, "belongs to another model: 'a', this run has 'b'; name another folder"),
        ({"cache": "fp16"}, "belongs to another cache: 'e4m3', this run has 'fp16'"),
        ({"version": "2"}, "belongs to another version: '1', this run has '2'"),
    ],
)
def test_another_model_format_or_version_is_refused(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    file = written(tmp_path)
    before = file.read_bytes()
    with pytest.raises(InputError, match=message):
        FileTier(tmp_path, IDENTITY | change)
    assert file.read_bytes() == before
    FileTier(tmp_path, IDENTITY).close()


def test_damage_is_found_and_the_file_removed(tmp_path: Path) -> None:
    """Every byte counts: 40 places all over the file, header included."""
    file = written(tmp_path)
    intact = file.read_bytes()
    for place in range(0, len(intact), len(intact) // 40):
        file.write_bytes(intact[:place] + bytes([intact[place] ^ 0x10]) + intact[place + 1 :])
        tier = FileTier(tmp_path, IDENTITY)
        assert tier.read(KEY) is None, f"byte {place}"
        assert tier.corrupt == 1 and KEY not in tier and not file.exists()
        tier.close()


@pytest.mark.parametrize("length", [0, 1, 8, 100, 4000, -1])
def test_a_truncated_file_is_found(tmp_path: Path, length: int) -> None:
    file = written(tmp_path)
    file.write_bytes(file.read_bytes()[:length])
    tier = FileTier(tmp_path, IDENTITY)
    assert tier.read(KEY) is None and tier.corrupt == 1 and not file.exists()


def test_a_file_under_anothers_name_is_found(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.rename(tmp_path / f"{OTHER.hex()}.safetensors")
    tier = FileTier(tmp_path, IDENTITY)
    assert OTHER in tier and tier.read(OTHER) is None and tier.corrupt == 1


def test_a_file_that_is_gone_is_no_error(tmp_path: Path) -> None:
    file = written(tmp_path)
    tier = FileTier(tmp_path, IDENTITY)
    file.unlink()
    assert tier.read(KEY) is None


def _write_and_hang(folder: Path, pipe: Connection) -> None:
    tier = FileTier(folder, IDENTITY)
    tier.write(KEY, 3, DATA)
    tier.written(wait=True)
    (folder / ".half-x.safetensors").write_bytes(b"half")
    pipe.send("written")
    signal.pause()


def test_a_killed_process_leaves_whole_files_and_no_lock(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_write_and_hang, args=(tmp_path, theirs))
    process.start()
    assert ours.poll(60) and ours.recv() == "written"
    with pytest.raises(InputError, match="is in use by another process"):
        FileTier(tmp_path, IDENTITY)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    tier = FileTier(tmp_path, IDENTITY)
    assert tier.read(KEY) is not None
    assert not (tmp_path / ".half-x.safetensors").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(InputError, match=r"holds thesis.tex and no prefix cache: name an empty folder"):
        FileTier(tmp_path, IDENTITY)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match="is a file, expected a folder"):
        FileTier(tmp_path / "thesis.tex", IDENTITY)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_identity_is_refused(tmp_path: Path, content: str) -> None:
    written(tmp_path)
    (tmp_path / "identity.json").write_text(content)
    with pytest.raises(InputError, match="name another folder"):
        FileTier(tmp_path, IDENTITY)


def test_a_write_that_fails_says_so(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "cache", IDENTITY)
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").write_text("in the way")
    tier.write(KEY, 3, DATA)
    with pytest.raises(OSError):
        tier.close()
