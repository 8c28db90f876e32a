"""Which groups a folder holds: within the limit, by use, and by what the files themselves say of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from page4.kvcache.file_index import FileIndex


def key(number: int) -> bytes:
    return bytes([number]) * 32


def put(index: FileIndex, number: int, size: int) -> list[bytes]:
    """Adds a group as its owner would: removes what has to go, then writes it; what had to go."""
    group, evicted = index.add(key(number), size)
    for gone in evicted:
        index.path(gone).unlink(missing_ok=True)
    index.path(key(number)).write_bytes(bytes(size))
    index.keep_time(key(number), group)
    group.whole = True
    return evicted


def test_the_group_used_longest_ago_makes_room(tmp_path: Path) -> None:
    index = FileIndex(tmp_path, limit=30)
    for number in (1, 2, 3):
        assert put(index, number, 10) == []
    index.use(key(1))
    assert put(index, 4, 10) == [key(2)]
    assert put(index, 5, 20) == [key(3), key(1)], "as many as it takes"
    assert index.nbytes == 30 and len(index) == 2


def test_a_group_is_there_once_it_is_whole_and_takes_room_before(tmp_path: Path) -> None:
    index = FileIndex(tmp_path, limit=10)
    group, _ = index.add(key(1), 10)
    assert key(1) not in index and len(index) == 0 and index.nbytes == 10
    group.whole = True
    assert key(1) in index and len(index) == 1


def test_a_group_that_is_written_again_goes_first(tmp_path: Path) -> None:
    index = FileIndex(tmp_path, limit=10)
    put(index, 1, 10)
    assert put(index, 1, 6) == [key(1)]
    assert index.nbytes == 6


def test_a_failed_group_leaves_its_successor_of_the_same_key_alone(tmp_path: Path) -> None:
    index = FileIndex(tmp_path, limit=10)
    failed, _ = index.add(key(1), 10)
    put(index, 1, 6)
    index.forget(key(1), failed)
    assert key(1) in index
    index.forget(key(1))
    assert key(1) not in index and index.nbytes == 0


def test_use_survives_the_process(tmp_path: Path) -> None:
    index = FileIndex(tmp_path, limit=30)
    for number in (1, 2, 3):
        put(index, number, 10)
    index.use(key(1))
    again = FileIndex(tmp_path, limit=30)
    assert again.nbytes == 30
    assert put(again, 4, 30) == [key(2), key(3), key(1)]


@pytest.mark.parametrize("ahead", [-(10**18), 10**18], ids=["put back", "put forward"])
def test_a_clock_that_was_wrong_does_not_change_the_order(
    tmp_path: Path, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example for the time of one process: what is used after that is still the later one."""
    right = time.time_ns
    index = FileIndex(tmp_path, limit=30)
    put(index, 1, 10)
    with monkeypatch.context() as patch:
        patch.setattr("time.time_ns", lambda: right() + ahead)
        put(FileIndex(tmp_path, limit=30), 2, 10)
    put(FileIndex(tmp_path, limit=30), 3, 10)
    assert put(FileIndex(tmp_path, limit=30), 4, 30) == [key(1), key(2), key(3)]


def test_another_owners_file_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time cannot be changed then, so the order is this process's only."""
    index = FileIndex(tmp_path, limit=20)
    put(index, 1, 10)
    put(index, 2, 10)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    index.use(key(1))
    assert index.evict(room=10) == [key(2)]


@given(
    limit=st.integers(10, 40),
    steps=st.lists(st.tuples(st.sampled_from(["add", "use"]), st.integers(1, 6), st.integers(0, 10))),
)
def test_any_sequence_against_a_plain_list(
    tmp_path_factory: pytest.TempPathFactory, limit: int, steps: list[tuple[str, int, int]]
) -> None:
    """And the folder's next owner finds the same groups in the same order."""
    folder = tmp_path_factory.mktemp("index")
    index = FileIndex(folder, limit)
    expected: list[tuple[int, int]] = []  # numbers and sizes, the one used longest ago first
    for step, number, size in steps:
        known = [(n, s) for n, s in expected if n == number]
        if step == "use":
            index.use(key(number))
            added = known
        else:
            put(index, number, size)
            added = [(number, size)]
        expected = [(n, s) for n, s in expected if n != number] + added
        while sum(s for _, s in expected) > limit:
            expected.pop(0)
        held = {file.name: file.stat().st_size for file in folder.iterdir()}
        assert held == {index.path(key(n)).name: s for n, s in expected}
        assert index.nbytes == sum(s for _, s in expected) <= limit
    assert FileIndex(folder, limit).evict(room=limit + 1) == [key(n) for n, _ in expected]
