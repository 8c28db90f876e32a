"""The file tier: groups of the host tier in a folder, for the next process."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from page4.kernels.atomic import atomic_path
from page4.kernels.errors import InputError
from page4.kernels.folder_lock import lock_folder

from .prefix_chain import Key

VERSION = "1"
IDENTITY_FILE = "identity.json"
_LOCK_FILE = "lock"
_TENSOR = "group"


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
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file, expected a folder of a prefix cache")
        folder.mkdir(parents=True, exist_ok=True)
        strange = [f.name for f in folder.iterdir() if not _ours(f)]
        if strange and not (folder / IDENTITY_FILE).exists():
            raise InputError(f"{folder} holds {strange[0]} and no prefix cache: name an empty folder")
        busy = f"the prefix cache {folder} is in use by another process"
        self._lock = lock_folder(folder / _LOCK_FILE, busy)
        self._identity = {"version": VERSION, **identity}
        try:
            _check_identity(folder / IDENTITY_FILE, self._identity)
        except InputError:
            self._lock.close()
            raise
        for left in folder.glob(".*.safetensors"):
            left.unlink()  # of a process that was killed
        self._keys = {bytes.fromhex(file.stem) for file in folder.glob("*.safetensors")}
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

    def read(self, key: Key) -> tuple[int, Tensor] | None:
        """Pages and bytes of a group; None, and the file is gone, if it is damaged."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                data = file.get_tensor(_TENSOR)
            pages = int(metadata["pages"])
            intact = metadata["checksum"] == _checksum(key, pages, data)
        except (SafetensorError, OSError, KeyError, ValueError):
            intact = False
        if not intact:
            self.corrupt += 1
            self._keys.discard(key)
            path.unlink(missing_ok=True)
            return None
        self.bytes_read += data.nbytes
        return pages, data

    def close(self) -> None:
        """Ends what is being written, and lets others use the folder."""
        try:
            self.written(wait=True)
        finally:
            self._writer.shutdown()
            self._lock.close()

    def _write(self, key: Key, pages: int, data: Tensor) -> int:
        metadata = {"pages": str(pages), "checksum": _checksum(key, pages, data)}
        with atomic_path(self._path(key)) as temporary:
            save_file({_TENSOR: data}, temporary, metadata)
        return data.nbytes

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key.hex()}.safetensors"


def _checksum(key: Key, pages: int, data: Tensor) -> str:
    """Over everything a reader relies on: a file under another's name, too, is found."""
    digest = hashlib.blake2b(key + pages.to_bytes(8, "little"), digest_size=32)
    digest.update(data.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _ours(file: Path) -> bool:
    return file.suffix == ".safetensors" or file.name in (IDENTITY_FILE, _LOCK_FILE)


def _check_identity(path: Path, identity: Mapping[str, str]) -> None:
    """Writes who the folder belongs to, or refuses it by the first difference."""
    if not path.exists():
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read ({error}): name another folder") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no JSON object: name another folder")
    for name in (*identity, *found):
        if found.get(name) != identity.get(name):
            raise InputError(
                f"the prefix cache {path.parent} belongs to another {name}: {found.get(name)!r}, "
                f"this run has {identity.get(name)!r}; name another folder"
            )
