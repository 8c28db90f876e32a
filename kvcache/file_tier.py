"""The file tier: groups of the host tier in a folder, for the next process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from page4.kernels.atomic import atomic_path, is_leftover, remove_leftovers
from page4.kernels.errors import InputError
from page4.kernels.folder_lock import lock_folder

from .prefix_chain import Key
from .strict_json import parse_json
from .tensor_file import save_tensors

VERSION = "1"
IDENTITY_FILE = "identity.json"
_LOCK_FILE = "lock"
_TENSOR = "group"
_GROUP = re.compile(r"([0-9a-f]{64})\.safetensors")


class FileTier:
    """One safetensors file a group, named by its key: written whole or not at all, checked when read.

    ``identity.json`` says which model and cache the groups belong to. Files are written beside everything
    else, by a thread that touches host memory only.

    Args:
        folder: made unless it is there; one process at a time may use it.
        identity: of model and cache, names and values for people.
    Raises:
        InputError: the folder is in use, holds something else, or belongs to another identity or version.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder = folder
        self.corrupt = 0
        """Files that were found damaged, and removed."""
        self.bytes_written = self.bytes_read = 0
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
            self._keys = _find_groups(folder)
        except BaseException:
            self._lock.close()
            raise
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefix-files")
        self._writing: deque[tuple[Key, Future[int]]] = deque()

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def write(self, key: Key, pages: int, data: Tensor) -> None:
        """Begins to write a group of so many pages, uint8 ``[nbytes]``; :meth:`written` ends it."""
        self._writing.append((key, self._writer.submit(self._write, key, pages, data)))

    def written(self, wait: bool = False) -> list[Key]:
        """Groups whose writing has ended since the last call.

        Raises:
            OSError: one could not be written.
        """
        ended = []
        while self._writing and (wait or self._writing[0][1].done()):
            key, future = self._writing.popleft()
            self.bytes_written += future.result()
            self._keys.add(key)
            ended.append(key)
        return ended

    def read(self, key: Key, pages: int, nbytes: int) -> Tensor | None:
        """A group of so many pages, uint8 ``[nbytes]``; None, and the file is gone, if it is damaged."""
        path = self._path(key)
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
            self._keys.discard(key)
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

    def _write(self, key: Key, pages: int, data: Tensor) -> int:
        metadata = {"pages": str(pages), "checksum": _checksum(key, pages, data)}
        save_tensors(self._path(key), {_TENSOR: data}, metadata)
        return data.nbytes

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key.hex()}.safetensors"


def _checksum(key: Key, pages: int, data: Tensor) -> str:
    """Over everything a reader relies on: a file under another's name, too, is found."""
    digest = hashlib.blake2b(key + pages.to_bytes(8, "little"), digest_size=32)
    digest.update(data.numpy().data)
    return digest.hexdigest()


def _ours(file: Path) -> bool:
    known = file.name in (IDENTITY_FILE, _LOCK_FILE) or _GROUP.fullmatch(file.name) is not None
    return known or is_leftover(file)


def _find_groups(folder: Path) -> set[Key]:
    """Keys of the groups that are there; whatever else a user has put there is left alone."""
    keys = set()
    for file in folder.iterdir():
        if name := _GROUP.fullmatch(file.name):
            if file.is_dir():
                raise InputError(f"{file} is a folder, expected a file of a prefix cache: remove it")
            keys.add(bytes.fromhex(name[1]))
    return keys


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
