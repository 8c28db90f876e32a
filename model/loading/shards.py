"""Index and shards of a checkpoint folder: what they hold by their headers, and reading one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kvcache.strict_json import parse_json

from .names import listed, one_line
from .stored import Stored

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, as its index names them.

    Raises:
        InputError: no checkpoint there, or a shard the index names is missing.
    """
    weight_map = _weight_map(folder)
    return [folder / _SINGLE] if weight_map is None else _present(folder, weight_map.values())


def catalogue(folder: Path, name_of: Callable[[str], str | None]) -> dict[str, Stored]:
    """What the folder holds, by the names that ``name_of`` gives the stored ones; only headers are read.

    Tensors for which it gives None are left out, and a shard that holds nothing else need not be there.

    Raises:
        InputError: no checkpoint there, a shard is missing or unreadable, the index and the shards disagree,
            or two tensors have one name.
    """
    weight_map = _weight_map(folder)
    if weight_map is None:
        files = [folder / _SINGLE]
    else:
        files = _present(folder, {f for name, f in weight_map.items() if name_of(name) is not None})
    found: dict[str, Stored] = {}
    seen: set[str] = set()
    for file in files:
        for stored in _header(file):
            name = name_of(stored.name)
            if name is None:
                continue
            if weight_map is not None and weight_map.get(stored.name) != file.name:
                raise InputError(
                    f"{folder}: {file.name} holds {listed([stored.name])}, the index says otherwise"
                )
            if name in found:
                raise InputError(
                    f"{folder}: {listed([name])} is stored twice, in {found[name].shard.name} and {file.name}"
                )
            found[name] = stored
            seen.add(stored.name)
    absent = {name for name in weight_map or () if name_of(name) is not None} - seen
    if absent:
        raise InputError(f"{folder}: shards lack what the index lists: {listed(absent)}")
    return found


class ShardReader:
    """Reads tensors, and keeps the last shard open: tensors of one shard are best read one after another.

    The system maps a shard into memory and counts the pages that were read until it is closed.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def read(self, stored: Stored) -> Tensor:
        """The tensor, on the CPU, as it is stored; it keeps its shard mapped as long as it lives.

        Raises:
            InputError: the shard cannot be read.
        """
        try:
            if self._path != stored.shard:
                self._close()
                self._file = safe_open(stored.shard, framework="pt").__enter__()
                self._path = stored.shard
            return self._file.get_tensor(stored.name)
        except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
            raise _unreadable(stored.shard, error) from error

    def _close(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._path = self._file = None


def _header(file: Path) -> list[Stored]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 - no mapping
            return [Stored(file, name, str(s.get_dtype()), tuple(s.get_shape())) for name, s in slices]
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> InputError:
    return InputError(f"{file}: not a readable safetensors file ({one_line(error)})")


def _weight_map(folder: Path) -> dict[str, str] | None:
    """File names by tensor name, as the index says; None for a checkpoint in a single file."""
    index = folder / _INDEX
    if not index.is_file():
        if (folder / _SINGLE).is_file():
            return None
        raise InputError(f"{folder}: no checkpoint there (expected {_INDEX} or {_SINGLE})")
    content = parse_json(index.read_bytes(), str(index))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise InputError(f"{index}: not a safetensors index (it has no object weight_map)")
    for file in weight_map.values():
        # A name with a folder in it would read files from elsewhere.
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise InputError(f"{index}: {file!a} is no name of a safetensors file in this folder")
    return weight_map


def _present(folder: Path, names: Iterable[str]) -> list[Path]:
    files = sorted(set(names))
    for name in files:
        try:
            there = (folder / name).is_file()
        except (OSError, ValueError):  # such as a name too long, or with a zero byte
            there = False
        if not there:
            raise InputError(f"{folder}: shard {listed([name])} is missing")
    return [folder / name for name in files]
