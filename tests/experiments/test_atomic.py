"""A file appears whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
from pathlib import Path

import pytest

from page4.experiments.atomic import (
    atomic_path,
    is_leftover,
    remove_leftovers,
    write_bytes,
    write_json,
    write_text,
)


def test_a_file_appears_when_the_block_ends_and_not_before(tmp_path: Path) -> None:
    target = tmp_path / "new" / "figure.png"
    with atomic_path(target) as temporary:
        temporary.write_text("half")
        assert not target.exists()
        assert temporary.parent == target.parent
        assert temporary.suffix == ".png"
        temporary.write_text("whole")
    assert target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


def test_an_exception_keeps_the_earlier_content_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_text(target, "old")
    with pytest.raises(KeyboardInterrupt), atomic_path(target) as temporary:
        temporary.write_text("half of the n")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failing_write_keeps_the_earlier_content(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"x": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(target, {"x": float("nan")})
    assert target.read_text() == '{"x": 1}\n'


@pytest.mark.parametrize(
    "value",
    [{}, [], None, 1.5, "a", [1, [2, []]], {"rows": [{"x": 1, "y": None}, {"x": {}}], 3: [True], "é\n": ()}],
)
def test_json_is_what_the_library_reads(value: object, tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(json.dumps(value))


def test_bytes_and_text_are_kept_as_they_are(tmp_path: Path) -> None:
    """Line ends too: texts are bound to checkpoints and results by their hashes."""
    write_bytes(tmp_path / "a", b"\xff\r\n\x00")
    write_text(tmp_path / "b.txt", "é\r\n\n")
    assert (tmp_path / "a").read_bytes() == b"\xff\r\n\x00"
    assert (tmp_path / "b.txt").read_bytes() == "é\r\n\n".encode()


def test_json_has_a_line_for_each_record(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"rows": [{"x": 1, "y": 2}, {"x": 3}]})
    assert (tmp_path / "a.json").read_text().splitlines()[2] == '    {"x": 1, "y": 2},'


def test_what_a_killed_process_leaves_is_known_by_its_name(tmp_path: Path) -> None:
    for name in ("figure.png", "lock", "a" * 64 + ".safetensors", "a.b.c"):
        with atomic_path(tmp_path / name) as temporary:
            assert is_leftover(temporary)
    left = [
        is_leftover(Path(name)) for name in ("figure.png", ".figure.png", ".gitignore", "a.partial-01234567")
    ]
    assert not any(left)


@pytest.mark.parametrize("name", ["state.pt", "state", "a.b.pt", "st*te.pt"])
def test_what_was_written_in_place_of_one_file_is_removed_alone(name: str, tmp_path: Path) -> None:
    """In a folder where others write, too."""
    others = {"state", "state.pt", ".state.pt", "stite.pt", "other.pt", "state.json", "xstate.pt"} - {name}
    kept = {f".{Path(other).stem}.partial-0123_abc{Path(other).suffix}" for other in others}
    kept |= others | {".state.partial-0123_ab.pt", name}
    for file in (*kept, f".{Path(name).stem}.partial-zzzzzzzz{Path(name).suffix}"):
        (tmp_path / file).touch()
    remove_leftovers(tmp_path, of=tmp_path / name)
    assert {file.name for file in tmp_path.iterdir()} == kept
    remove_leftovers(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {*others, name, ".state.partial-0123_ab.pt"}


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """As a limit on the size of files makes it: writing fails, and the system says nothing of where."""
    write_text(tmp_path / "a.txt", "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            write_text(tmp_path / "a.txt", 10_000 * "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path / "a.txt"))
    assert (tmp_path / "a.txt").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_file_gets_the_mode_of_an_ordinary_file(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
