"""Which groups the folder of a file tier holds, and which of them make room for others."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from page4.kernels.errors import InputError

from .prefix_chain import Key

_GROUP = re.compile(r"([0-9a-f]{64})\.safetensors")


@dataclass
class StoredGroup:
    """One group's file.

    Attributes:
        nbytes: of the file.
        used: when it was used last, nanoseconds; greater than that of every group used before.
        whole: its writing has ended.
    """

    nbytes: int
    used: int
    whole: bool


class FileIndex:
    """Groups by key, within a limit of bytes; the one used longest ago makes room.

    A file's modification time says when its group was used last, so that the order survives the process.
    The index says what has to go, and removes nothing itself.

    Args:
        folder: whose groups are listed; whatever else is in it is left alone.
        limit: bytes of all groups' files.
    Raises:
        InputError: a folder has a group's name.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        found = sorted(_find_groups(folder), key=lambda item: (item[1].used, item[0]))
        self._groups: OrderedDict[Key, StoredGroup] = OrderedDict(found)
        self._latest = max((group.used for group in self._groups.values()), default=0)

    def __contains__(self, key: Key) -> bool:
        """Whether a group's file is there, and whole."""
        group = self._groups.get(key)
        return group is not None and group.whole

    def __len__(self) -> int:
        return sum(group.whole for group in self._groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all groups, those that are being written among them."""
        return sum(group.nbytes for group in self._groups.values())

    def path(self, key: Key) -> Path:
        """A group's file."""
        return self._folder / f"{key.hex()}.safetensors"

    def use(self, key: Key) -> None:
        """A group has been used: it makes room after all others. Nothing for one that is not there."""
        if key in self._groups:
            self._groups.move_to_end(key)
            self._groups[key].used = self._now()
            self.keep_time(key, self._groups[key])

    def add(self, key: Key, nbytes: int) -> tuple[StoredGroup, list[Key]]:
        """Takes a group that is going to be written.

        Returns:
            It, to be made :attr:`StoredGroup.whole` once it is; and the groups whose files have to be removed
            before it is written.
        """
        replaced = [key] if self._groups.pop(key, None) is not None else []
        evicted = self.evict(nbytes)
        group = self._groups[key] = StoredGroup(nbytes, self._now(), whole=False)
        return group, replaced + evicted

    def evict(self, room: int = 0) -> list[Key]:
        """Forgets groups until there is room for so many bytes; their files have to be removed."""
        evicted, nbytes = [], self.nbytes + room
        while nbytes > self._limit and self._groups:
            key, group = self._groups.popitem(last=False)
            nbytes -= group.nbytes
            evicted.append(key)
        return evicted

    def forget(self, key: Key, group: StoredGroup | None = None) -> None:
        """Forgets a group whose file is of no use; with ``group``, unless its key has another one by now."""
        if group is None or self._groups.get(key) is group:
            self._groups.pop(key, None)

    def keep_time(self, key: Key, group: StoredGroup) -> None:
        """Gives the file the time at which its group was used last, if it is there and ours to change."""
        with contextlib.suppress(OSError):
            os.utime(self.path(key), ns=(group.used, group.used), follow_symlinks=False)

    def _now(self) -> int:
        """Later than every time before it, even where the clock was put back."""
        self._latest = max(self._latest + 1, time.time_ns())
        return self._latest


def is_group(file: Path) -> bool:
    """Whether a file is a group's, by its name."""
    return _GROUP.fullmatch(file.name) is not None


def _find_groups(folder: Path) -> list[tuple[Key, StoredGroup]]:
    found = []
    for file in folder.iterdir():
        if name := _GROUP.fullmatch(file.name):
            if file.is_dir():
                raise InputError(f"{file} is a folder, expected a file of a prefix cache: remove it")
            with contextlib.suppress(FileNotFoundError):  # somebody removes files just now
                status = file.lstat()
                size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                found.append((bytes.fromhex(name[1]), StoredGroup(size, status.st_mtime_ns, whole=True)))
    return found
