"""Files of a prefix cache: whole, checked, for the model that wrote them, and for one process at a time."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from page4.kernels.atomic import atomic_path
from page4.kernels.errors import InputError
from page4.kvcache.file_tier import FileTier, _checksum

IDENTITY = {"model": "a", "cache": "e4m3"}
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
DATA = torch.arange(1000, dtype=torch.int64).view(torch.uint8)
SIZE = 3, DATA.nbytes


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
    found = tier.read(KEY, *SIZE)
    assert found is not None and torch.equal(found, DATA)
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
        assert tier.read(KEY, *SIZE) is None, f"byte {place}"
        assert tier.corrupt == 1 and KEY not in tier and not file.exists()
        tier.close()


@pytest.mark.parametrize("length", [0, 1, 8, 100, 4000, -1])
def test_a_truncated_file_is_found(tmp_path: Path, length: int) -> None:
    file = written(tmp_path)
    file.write_bytes(file.read_bytes()[:length])
    tier = FileTier(tmp_path, IDENTITY)
    assert tier.read(KEY, *SIZE) is None and tier.corrupt == 1 and not file.exists()


def test_a_file_under_anothers_name_is_found(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.rename(tmp_path / f"{OTHER.hex()}.safetensors")
    tier = FileTier(tmp_path, IDENTITY)
    assert OTHER in tier and tier.read(OTHER, *SIZE) is None and tier.corrupt == 1


def test_a_file_that_is_gone_is_no_error(tmp_path: Path) -> None:
    file = written(tmp_path)
    tier = FileTier(tmp_path, IDENTITY)
    file.unlink()
    assert tier.read(KEY, *SIZE) is None


def _write_and_hang(folder: Path, pipe: Connection) -> None:
    tier = FileTier(folder, IDENTITY)
    tier.write(KEY, 3, DATA)
    tier.written(wait=True)
    with atomic_path(tier.folder / f"{OTHER.hex()}.safetensors") as half:
        half.write_bytes(b"half")
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
    assert tier.read(KEY, *SIZE) is not None
    assert {file.name for file in tmp_path.iterdir()} == {f"{KEY.hex()}.safetensors", "identity.json", "lock"}


def test_a_process_killed_before_it_owned_the_folder_leaves_it_to_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".identity.partial-ab_12345.json").write_text("{")
    FileTier(tmp_path, IDENTITY).close()
    assert {file.name for file in tmp_path.iterdir()} == {"identity.json", "lock"}


@pytest.mark.parametrize("name", ["thesis.tex", "model.safetensors", ".mine.safetensors"])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    """Also of a checkpoint: a file is ours by its whole name."""
    (tmp_path / name).write_text("all of it")
    with pytest.raises(InputError, match=rf"holds {name} and no prefix cache: name an empty folder"):
        FileTier(tmp_path, IDENTITY)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    with pytest.raises(InputError, match="is a file, expected a folder"):
        FileTier(tmp_path / name, IDENTITY)


def test_files_that_a_user_adds_are_left_alone(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "model.safetensors").write_text("all of it")
    (tmp_path / ".mine.safetensors").mkdir()
    with contextlib.closing(FileTier(tmp_path, IDENTITY)) as tier:
        assert len(tier) == 1
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / ".mine.safetensors").exists()


def test_a_lock_that_is_a_link_does_not_empty_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("precious")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "lock").symlink_to(tmp_path / "letter")
    FileTier(tmp_path / "cache", IDENTITY).close()
    assert (tmp_path / "letter").read_text() == "precious"


def test_a_folder_in_place_of_a_group_is_refused_at_once(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(InputError, match=r"safetensors is a folder, expected a file of a prefix cache"):
        FileTier(tmp_path, IDENTITY)


@pytest.mark.parametrize("target", ["nowhere", "itself"])
def test_a_link_to_nothing_in_place_of_a_group_is_removed(tmp_path: Path, target: str) -> None:
    file = written(tmp_path)
    file.unlink()
    file.symlink_to(tmp_path / "nowhere" if target == "nowhere" else file)
    with contextlib.closing(FileTier(tmp_path, IDENTITY)) as tier:
        assert tier.read(KEY, *SIZE) is None and tier.corrupt == 1 and not file.is_symlink()


@pytest.mark.parametrize(
    ("pages", "data"),
    [
        ("2", DATA),
        ("-3", DATA),
        (str(2**64), DATA),
        ("three", DATA),
        ("3", DATA[:-1].clone()),
        ("3", DATA.view(torch.int64)),
        ("3", DATA.view(10, -1)),
        ("3", torch.tensor(1.0)),
    ],
)
def test_a_whole_file_of_another_size_is_found(tmp_path: Path, pages: str, data: torch.Tensor) -> None:
    """Its checksum may be right: whoever asks knows how large the group has to be."""
    file = written(tmp_path)
    if pages in ("2", "3") and data.dtype == torch.uint8:
        checksum = _checksum(KEY, int(pages), data)
    else:
        checksum = _checksum(KEY, 3, DATA)
    save_file({"group": data}, file, {"pages": pages, "checksum": checksum})
    with contextlib.closing(FileTier(tmp_path, IDENTITY)) as tier:
        assert tier.read(KEY, *SIZE) is None and tier.corrupt == 1 and not file.exists()


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 10**5, '{"version": NaN}', b"\xff"])
def test_a_damaged_identity_is_refused(tmp_path: Path, content: str | bytes) -> None:
    written(tmp_path)
    (tmp_path / "identity.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match="name another folder"):
        FileTier(tmp_path, IDENTITY)


def test_a_write_that_fails_says_so(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "cache", IDENTITY)
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").write_text("in the way")
    tier.write(KEY, 3, DATA)
    with pytest.raises(OSError):
        tier.close()


def test_a_full_disk_is_an_error_of_the_file_and_leaves_no_part_of_it(tmp_path: Path) -> None:
    """As a limit on the size of files makes it; the library that writes reports it as its own error."""
    tier = FileTier(tmp_path, IDENTITY)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        tier.write(KEY, 3, DATA)
        with pytest.raises(OSError) as raised:
            tier.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert raised.value.filename == str(tmp_path / f"{KEY.hex()}.safetensors")
    assert {file.name for file in tmp_path.iterdir()} == {"identity.json", "lock"}
