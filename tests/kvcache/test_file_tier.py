"""Files of a prefix cache: whole, checked, within a limit, for one model, and for one process at a time."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from page4.kernels.atomic import atomic_path
from page4.kernels.errors import InputError
from page4.kvcache import file_tier
from page4.kvcache.file_tier import _HEADER, FileTier, _checksum

IDENTITY = {"model": "a", "cache": "e4m3"}
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
DATA = torch.arange(1000, dtype=torch.int64).view(torch.uint8)
SIZE = 3, DATA.nbytes
FILE = DATA.nbytes + _HEADER
"""The most that the file of a group takes."""


def opened(folder: Path, limit: int = 2**20, **identity: str) -> FileTier:
    return FileTier(folder, IDENTITY | identity, limit, largest=DATA.nbytes)


def written(folder: Path, **identity: str) -> Path:
    """A folder with one group, closed; its file."""
    tier = opened(folder, **identity)
    tier.write(KEY, 3, DATA)
    tier.close()
    return folder / f"{KEY.hex()}.safetensors"


def test_groups_survive_a_restart(tmp_path: Path) -> None:
    written(tmp_path)
    tier = opened(tmp_path)
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
        opened(tmp_path, **change)
    assert file.read_bytes() == before
    opened(tmp_path).close()


def test_damage_is_found_and_the_file_removed(tmp_path: Path) -> None:
    """Every byte counts: 40 places all over the file, header included."""
    file = written(tmp_path)
    intact = file.read_bytes()
    for place in range(0, len(intact), len(intact) // 40):
        file.write_bytes(intact[:place] + bytes([intact[place] ^ 0x10]) + intact[place + 1 :])
        tier = opened(tmp_path)
        assert tier.read(KEY, *SIZE) is None, f"byte {place}"
        assert tier.corrupt == 1 and KEY not in tier and not file.exists()
        tier.close()


@pytest.mark.parametrize("length", [0, 1, 8, 100, 4000, -1])
def test_a_truncated_file_is_found(tmp_path: Path, length: int) -> None:
    file = written(tmp_path)
    file.write_bytes(file.read_bytes()[:length])
    tier = opened(tmp_path)
    assert tier.read(KEY, *SIZE) is None and tier.corrupt == 1 and not file.exists()


def test_a_file_under_anothers_name_is_found(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.rename(tmp_path / f"{OTHER.hex()}.safetensors")
    tier = opened(tmp_path)
    assert OTHER in tier and tier.read(OTHER, *SIZE) is None and tier.corrupt == 1


def test_a_file_that_is_gone_is_no_error(tmp_path: Path) -> None:
    file = written(tmp_path)
    tier = opened(tmp_path)
    file.unlink()
    assert tier.read(KEY, *SIZE) is None


def _write_and_hang(folder: Path, pipe: Connection) -> None:
    tier = opened(folder)
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
        opened(tmp_path)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    tier = opened(tmp_path)
    assert tier.read(KEY, *SIZE) is not None
    assert {file.name for file in tmp_path.iterdir()} == {f"{KEY.hex()}.safetensors", "identity.json", "lock"}


def test_a_process_killed_before_it_owned_the_folder_leaves_it_to_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".identity.partial-ab_12345.json").write_text("{")
    opened(tmp_path).close()
    assert {file.name for file in tmp_path.iterdir()} == {"identity.json", "lock"}


@pytest.mark.parametrize("name", ["thesis.tex", "model.safetensors", ".mine.safetensors"])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    """Also of a checkpoint: a file is ours by its whole name."""
    (tmp_path / name).write_text("all of it")
    with pytest.raises(InputError, match=rf"holds {name} and no prefix cache: name an empty folder"):
        opened(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    with pytest.raises(InputError, match="is a file, expected a folder"):
        opened(tmp_path / name)


def test_files_that_a_user_adds_are_left_alone(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "model.safetensors").write_text("all of it")
    (tmp_path / ".mine.safetensors").mkdir()
    with contextlib.closing(opened(tmp_path)) as tier:
        assert len(tier) == 1
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / ".mine.safetensors").exists()


def test_a_lock_that_is_a_link_does_not_empty_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("precious")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "lock").symlink_to(tmp_path / "letter")
    opened(tmp_path / "cache").close()
    assert (tmp_path / "letter").read_text() == "precious"


def test_a_folder_in_place_of_a_group_is_refused_at_once(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(InputError, match=r"safetensors is a folder, expected a file of a prefix cache"):
        opened(tmp_path)


@pytest.mark.parametrize("target", ["nowhere", "itself"])
def test_a_link_to_nothing_in_place_of_a_group_is_removed(tmp_path: Path, target: str) -> None:
    file = written(tmp_path)
    file.unlink()
    file.symlink_to(tmp_path / "nowhere" if target == "nowhere" else file)
    with contextlib.closing(opened(tmp_path)) as tier:
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
    with contextlib.closing(opened(tmp_path)) as tier:
        assert tier.read(KEY, *SIZE) is None and tier.corrupt == 1 and not file.exists()


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 10**5, '{"version": NaN}', b"\xff"])
def test_a_damaged_identity_is_refused(tmp_path: Path, content: str | bytes) -> None:
    written(tmp_path)
    (tmp_path / "identity.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match="name another folder"):
        opened(tmp_path)


def test_a_write_that_fails_says_so(tmp_path: Path) -> None:
    tier = opened(tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").write_text("in the way")
    tier.write(KEY, 3, DATA)
    with pytest.raises(OSError):
        tier.close()


def test_a_full_disk_is_an_error_of_the_file_and_leaves_no_part_of_it(tmp_path: Path) -> None:
    """As a limit on the size of files makes it; the library that writes reports it as its own error."""
    tier = opened(tmp_path)
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


def key(number: int) -> bytes:
    return bytes([number]) * 32


def fill(tier: FileTier, *numbers: int) -> None:
    for number in numbers:
        tier.write(key(number), 3, DATA)
        tier.written(wait=True)


def groups(folder: Path) -> set[int]:
    """Numbers of the groups whose files are there."""
    return {int(file.name[:2], 16) for file in folder.glob("*.safetensors") if len(file.stem) == 64}


def test_a_file_takes_no_more_than_it_is_counted_for(tmp_path: Path) -> None:
    """At the largest sizes that the header could have to tell, too."""
    size = written(tmp_path).stat().st_size
    assert DATA.nbytes < size <= FILE
    assert size + 2 * len(str(2**63)) + len(str(2**31)) <= FILE


def test_a_full_folder_forgets_what_was_used_longest_ago(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path, limit=3 * FILE)) as tier:
        fill(tier, 1, 2, 3)
        tier.use([key(2), key(1), key(9)])
        fill(tier, 4)
        assert key(3) not in tier and tier.read(key(3), *SIZE) is None
        assert (tier.evicted, tier.corrupt, len(tier)) == (1, 0, 3)
    assert groups(tmp_path) == {1, 2, 4}
    with contextlib.closing(opened(tmp_path, limit=3 * FILE)) as tier:
        fill(tier, 5)
    assert groups(tmp_path) == {1, 4, 5}, "what was used before the restart counts"


def test_what_is_used_before_its_file_is_there_keeps_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning of a prompt, while its end waits to be written."""
    allowed = threading.Event()

    def waiting(*arguments: object) -> None:
        allowed.wait(60)
        save_tensors(*arguments)  # type: ignore[arg-type]

    save_tensors = file_tier.save_tensors
    monkeypatch.setattr(file_tier, "save_tensors", waiting)
    with contextlib.closing(opened(tmp_path)) as tier:
        for number in (1, 2):
            tier.write(key(number), 3, DATA)
        tier.use([key(1)])
        allowed.set()
    opened(tmp_path, limit=FILE).close()
    assert groups(tmp_path) == {1}


def test_the_limit_holds_before_and_after_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups come faster than they are written; what has to go does so before the next one is begun."""
    sizes = []

    def measured(*arguments: object) -> None:
        sizes.append(sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) + FILE)
        save_tensors(*arguments)  # type: ignore[arg-type]

    save_tensors = file_tier.save_tensors
    monkeypatch.setattr(file_tier, "save_tensors", measured)
    with contextlib.closing(opened(tmp_path, limit=2 * FILE)) as tier:
        for number in range(1, 8):
            tier.write(key(number), 3, DATA)
        assert tier.written(wait=True) == [key(number) for number in range(1, 8)]
        assert [key(number) in tier for number in range(1, 8)] == [False] * 5 + [True] * 2
        assert tier.nbytes <= 2 * FILE and tier.evicted == 5
    assert groups(tmp_path) == {6, 7}
    assert len(sizes) == 7 and max(sizes) <= 2 * FILE


def test_a_lower_limit_holds_from_the_start_and_touches_nobody_elses_files(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path)) as tier:
        fill(tier, 1, 2, 3)
    (tmp_path / "model.safetensors").write_bytes(bytes(100_000))
    (tmp_path / f"{'00' * 31}.safetensors").write_text("a digit short")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / f"{key(4).hex()}.safetensors").write_text("elsewhere")
    with contextlib.closing(opened(tmp_path, limit=FILE)) as tier:
        assert (tier.evicted, len(tier)) == (2, 1) and tier.read(key(3), *SIZE) is not None
    names = {"model.safetensors", f"{'00' * 31}.safetensors", "notes", "identity.json", "lock"}
    assert {file.name for file in tmp_path.iterdir()} == {*names, f"{key(3).hex()}.safetensors"}
    assert len(list((tmp_path / "notes").iterdir())) == 1


def test_of_a_link_to_a_group_elsewhere_the_link_goes(tmp_path: Path) -> None:
    """A folder that was moved to another disk file by file, say."""
    disk, cache = tmp_path / "disk", tmp_path / "cache"
    disk.mkdir()
    with contextlib.closing(opened(cache)) as tier:
        fill(tier, 1)
    place = disk / "group"
    (cache / f"{key(1).hex()}.safetensors").rename(place)
    (cache / f"{key(1).hex()}.safetensors").symlink_to(place)
    before = place.stat().st_mtime_ns
    with contextlib.closing(opened(cache, limit=FILE)) as tier:
        tier.use([key(1)])
        assert tier.read(key(1), *SIZE) is not None
        fill(tier, 2)
        fill(tier, 3)
    assert groups(cache) == {3} and not (cache / f"{key(1).hex()}.safetensors").is_symlink()
    assert place.stat().st_mtime_ns == before and place.stat().st_size > DATA.nbytes


def test_what_somebody_else_has_removed_makes_room_without_an_error(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path, limit=2 * FILE)) as tier:
        fill(tier, 1, 2)
        (tmp_path / f"{key(1).hex()}.safetensors").unlink()
        fill(tier, 3)
    assert groups(tmp_path) == {2, 3}


def _evict_and_be_killed(folder: Path) -> None:
    """Dies between two removals that one group needs."""
    tier = opened(folder, limit=3 * FILE)
    unlink, removed = Path.unlink, []

    def killed(path: Path, missing_ok: bool = False) -> None:
        if removed:
            os.kill(os.getpid(), signal.SIGKILL)
        removed.append(path)
        unlink(path, missing_ok)

    Path.unlink = killed  # type: ignore[method-assign]
    tier.write(key(4), 3, torch.cat([DATA, DATA[:-_HEADER]]))
    tier.written(wait=True)


def test_a_process_killed_while_it_makes_room_leaves_a_folder_that_goes_on(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path, limit=3 * FILE)) as tier:
        fill(tier, 1, 2, 3)
    process = multiprocessing.get_context("fork").Process(target=_evict_and_be_killed, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert groups(tmp_path) == {2, 3}, "one of the two that had to go"
    with contextlib.closing(opened(tmp_path, limit=3 * FILE)) as tier:
        for number in (2, 3):
            assert tier.read(key(number), *SIZE) is not None
        fill(tier, 4, 5)
        assert tier.corrupt == 0
    assert groups(tmp_path) == {3, 4, 5}


def test_a_group_that_could_not_be_written_takes_no_room(tmp_path: Path) -> None:
    tier = opened(tmp_path / "cache", limit=FILE)
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").write_text("in the way")
    tier.write(KEY, 3, DATA)
    with pytest.raises(OSError):
        tier.written(wait=True)
    assert tier.nbytes == 0 and KEY not in tier
    (tmp_path / "cache").unlink()
    (tmp_path / "moved").rename(tmp_path / "cache")
    tier.write(KEY, 3, DATA)
    tier.close()
    assert KEY in tier


def test_a_limit_below_one_group_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    file = written(tmp_path / "cache")
    message = (
        "the file tier has 7.93e-06 GiB, one group takes 7.45e-06: raise folder_gib or lower the snapshot"
    )
    with pytest.raises(InputError, match=message):
        opened(tmp_path / "cache", limit=FILE - 1)
    assert file.exists()
    with pytest.raises(InputError, match="raise folder_gib"):
        opened(tmp_path / "new", limit=1)
    assert not (tmp_path / "new").exists()
