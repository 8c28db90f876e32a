"""The file tier: groups of the host tier in a folder, for the next process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from page4.kernels.atomic import atomic_path, is_leftover, remove_leftovers
from page4.kernels.errors import InputError
from page4.kernels.folder_lock import lock_folder

from .file_index import FileIndex, StoredGroup, is_group
from .prefix_chain import Key
from .strict_json import parse_json
from .tensor_file import save_tensors

VERSION = "1"
IDENTITY_FILE = "identity.json"
_LOCK_FILE = "lock"
_TENSOR = "group"
_HEADER = 512  # bytes of a file before the group's, at most


class FileTier:
    """One safetensors file a group, named by its key: written whole or not at all, checked when read.

    ``identity.json`` says which model and cache the groups belong to. Files are written beside everything
    else, by a thread that touches host memory only. The groups used longest ago make room for others: their
    files are removed before a new one is begun, so the limit holds at any time.

    Args:
        folder: made unless it is there; one process at a time may use it.
        identity: of model and cache, names and values for people.
        limit: bytes of all groups' files.
        largest: bytes of the largest group.
    Raises:
        InputError: the limit does not hold one group; the folder is in use, holds something else, or belongs
            to another identity or version.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str], limit: int, largest: int) -> None:
        self.folder = folder
        self.corrupt = 0
        """Files that were found damaged, and removed."""
        self.evicted = 0
        """Files that were removed to make room."""
        self.bytes_written = self.bytes_read = 0
        if limit < largest + _HEADER:
            raise InputError(
                f"the file tier has {limit / 2**30:.3g} GiB, one group takes {largest / 2**30:.3g}: "
                "raise folder_gib or lower the snapshot interval"
            )
        if os.path.lexists(folder) and not folder.is_dir():
            raise InputError(f"{folder} is a file, expected a folder of a prefix cache")
        folder.mkdir(parents=True, exist_ok=True)
        strange = next((f.name for f in folder.iterdir() if not _ours(f)), None)
        if strange is not None and not (folder / IDENTITY_FILE).exists():
            raise InputError(f"{folder} holds {strange} and no prefix cache: name an empty folder")
        busy = f"the prefix cache {folder} is in use by another process"
        self._lock = lock_folder(folder / _LOCK_FILE, busy)
        self._identity = {"version": VERSION, **identity}
        try:
            _check_identity(folder / IDENTITY_FILE, self._identity)
            remove_leftovers(folder)
            self._index = FileIndex(folder, limit)
            self._remove(self._index.evict())
        except BaseException:
            self._lock.close()
            raise
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefix-files")
        self._writing: deque[tuple[Key, StoredGroup, Future[int]]] = deque()

    def __contains__(self, key: Key) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of all groups' files; of those that are being written, the most they may take."""
        return self._index.nbytes

    def use(self, keys: Iterable[Key]) -> None:
        """Groups have been used, in this order: the last of them makes room last.

        Those that are not here are left out.
        """
        for key in keys:
            self._index.use(key)

    def write(self, key: Key, pages: int, data: Tensor) -> None:
        """Begins to write a group of so many pages, uint8 ``[nbytes]``; :meth:`written` ends it."""
        group, evicted = self._index.add(key, data.nbytes + _HEADER)
        self._writing.append((key, group, self._writer.submit(self._write, key, pages, data, group, evicted)))

    def written(self, wait: bool = False) -> list[Key]:
        """Groups whose writing has ended since the last call.

        Raises:
            OSError: one could not be written.
        """
        ended = []
        while self._writing and (wait or self._writing[0][2].done()):
            key, group, future = self._writing.popleft()
            try:
                self.bytes_written += future.result()
            except BaseException:
                self._index.forget(key, group)
                raise
            group.whole = True
            ended.append(key)
        return ended

    def read(self, key: Key, pages: int, nbytes: int) -> Tensor | None:
        """A group of so many pages, uint8 ``[nbytes]``; None if it is not here, or damaged and now gone."""
        if key not in self:
            return None
        path = self._index.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                data = file.get_tensor(_TENSOR)
            expected = str(pages), torch.uint8, (nbytes,)
            intact = (metadata.get("pages"), data.dtype, tuple(data.shape)) == expected
            intact = intact and metadata.get("checksum") == _checksum(key, pages, data)
        except (SafetensorError, OSError):
            intact = False
        if not intact:
            self.corrupt += 1
            self._index.forget(key)
            with contextlib.suppress(OSError):  # what cannot be removed is written over
                path.unlink()
            return None
        self.bytes_read += nbytes
        return data

    def close(self) -> None:
        """Ends what is being written, and lets others use the folder."""
        try:
            self.written(wait=True)
        finally:
            self._writer.shutdown()
            self._lock.close()

    def _write(self, key: Key, pages: int, data: Tensor, group: StoredGroup, evicted: list[Key]) -> int:
        self._remove(evicted)
        metadata = {"pages": str(pages), "checksum": _checksum(key, pages, data)}
        save_tensors(self._index.path(key), {_TENSOR: data}, metadata)
        self._index.keep_time(key, group)  # it may have been used since
        return data.nbytes

    def _remove(self, evicted: list[Key]) -> None:
        for key in evicted:
            self._index.path(key).unlink(missing_ok=True)
            self.evicted += 1


def _checksum(key: Key, pages: int, data: Tensor) -> str:
    """Over everything a reader relies on: a file under another's name, too, is found."""
    digest = hashlib.blake2b(key + pages.to_bytes(8, "little"), digest_size=32)
    digest.update(data.numpy().data)
    return digest.hexdigest()


def _ours(file: Path) -> bool:
    return file.name in (IDENTITY_FILE, _LOCK_FILE) or is_group(file) or is_leftover(file)


def _check_identity(path: Path, identity: Mapping[str, str]) -> None:
    """Writes who the folder belongs to, or refuses it by the first difference."""
    if not path.exists():
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        return
    try:
        found = parse_json(path.read_bytes(), str(path))
    except InputError as error:
        raise InputError(f"{error}; name another folder") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no JSON object: name another folder")
    for name in (*identity, *found):
        if found.get(name) != identity.get(name):
            raise InputError(
                f"the prefix cache {path.parent} belongs to another {name}: {found.get(name)!r}, "
                f"this run has {identity.get(name)!r}; name another folder"
            )
