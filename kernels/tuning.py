"""Which tuned configuration a call gets: looked up by GPU, Triton version and key, without synchronising."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import triton

from page4.kernels.codecs import BYTE_FLOATS
from page4.kernels.errors import InputError
from page4.kernels.tunable import TUNABLE, get_tunable
from page4.kernels.tuning_file import Entry, TuningFile, gpu_family, read_tuning_file, tuning_path

Origin = Literal["exact", "bucket", "predicted exact", "predicted bucket", "default"]

"""How a configuration was found: recorded for the key, for one near it, or decided by the kernel's rule."""

ResultT = TypeVar("ResultT")

_MOST_MEMOS = 4096  # a result for every shape that a long run meets, in some MB

SHIPPED_FOLDER = Path(__file__).parent / "configs"
_KEYWORDS: dict[object, Path | None] = {"shipped": SHIPPED_FOLDER, "defaults": None}


@dataclass(frozen=True)
class Match:
    """A recorded configuration and how it was found; ``predicted`` where no GPU ever measured it."""

    config: Any
    origin: Origin


class Configurations:
    """One folder of configurations, read as kernels ask for them, and a record of what they were given.

    Attributes:
        source: ``shipped`` (those of this package), ``defaults`` (none: every kernel decides by rule) or a
            folder.

    Raises:
        InputError: the folder does not exist.
    """

    def __init__(self, source: Path | str = "shipped") -> None:
        self.source = source
        self.folder = _KEYWORDS[source] if isinstance(source, str) and source in _KEYWORDS else Path(source)
        self._memo: dict[Hashable, Any] = {}
        if source not in _KEYWORDS and self.folder is not None and not self.folder.is_dir():
            raise InputError(f"the folder of kernel configurations {self.folder} does not exist")
        self._files: dict[Path, TuningFile | None] = {}
        self._used: dict[tuple[str, Any, Any], Origin] = {}

    def lookup(self, kernel: str, key: Any, device: torch.device) -> Match | None:
        """The configuration recorded for a key, else that of the nearest key within its ``REACH``, else None.

        Near is a small sum of ``|log2|`` of the ratios of the fields in ``REACH``; of equally near entries
        the one with the smaller fields counts. A byte float without entries takes those of e4m3, which moves
        the same bytes.

        Raises:
            InputError: an unusable file, or a folder given by the user that has nothing for this GPU and
                Triton.
        """
        file = self._read(kernel, device)
        if file is None:
            return None
        if key in file.entries:
            entry = file.entries[key]
            return Match(entry.config, "predicted exact" if entry.predicted else "exact")
        near = nearest(file, key)
        if near is None and getattr(key, "kv_format", None) in BYTE_FLOATS:
            near = nearest(file, dataclasses.replace(key, kv_format="e4m3"))
        if near is None:
            return None
        return Match(near.config, "predicted bucket" if near.predicted else "bucket")

    def resolve(self, kernel: str, key: Any, device: torch.device, default: Any, tuned: bool = True) -> Match:
        """What is recorded for a key, else the default; notes that the kernel runs with it.

        Calls that are not like the measured ones (of FP32 numbers) are not ``tuned``: they get the default.
        """
        match = (self.lookup(kernel, key, device) if tuned else None) or Match(default, "default")
        self.note(kernel, key, match.config, match.origin)
        return match

    def once(self, seen: Hashable, make: Callable[[], ResultT]) -> ResultT:
        """``make()``, called once for everything that decides its result.

        Costs a look into a dictionary from then on, as long as this source is used.
        """
        if seen not in self._memo:
            if len(self._memo) >= _MOST_MEMOS:
                self._memo.clear()
            self._memo[seen] = make()
        result: ResultT = self._memo[seen]
        return result

    def note(self, kernel: str, key: Any, config: Any, origin: Origin) -> None:
        """Record that a kernel runs with a configuration."""
        self._used[kernel, key, config] = origin

    def record(self) -> dict[str, Any]:
        """The source, its files with their SHA-256, and every configuration that was used; of JSON types."""
        files = {path.as_posix(): file.sha256 for path, file in sorted(self._files.items()) if file}
        used = [
            {
                "kernel": kernel,
                "key": dataclasses.asdict(key),
                "config": dataclasses.asdict(config),
                "origin": origin,
            }
            for (kernel, key, config), origin in self._used.items()
        ]
        source = self.source
        if source not in _KEYWORDS:
            # A folder is known by its files; its path means nothing on another machine.
            name = Path(source).name
            source = f"./{name}" if name in _KEYWORDS else name
        return {"source": source, "files": files, "used": used}

    def _read(self, kernel: str, device: torch.device) -> TuningFile | None:
        if self.folder is None:
            return None
        path = tuning_path(kernel, device_name(device), triton_version())
        if path not in self._files:
            present = (self.folder / path).is_file()
            if not present and self.source != "shipped" and not (self.folder / path).parent.is_dir():
                raise InputError(f"{self.folder} holds no configurations for {path.parent}")
            self._files[path] = read_tuning_file(self.folder / path, get_tunable(kernel)) if present else None
        return self._files[path]


def nearest(file: TuningFile, key: Any) -> Entry | None:
    """The entry of the nearest key within reach, see :meth:`Configurations.lookup`."""
    wanted = dataclasses.asdict(key)
    best: tuple[tuple[float, ...], Entry] | None = None
    for entry in file.entries.values():
        distance, fields = 0.0, []
        for name, value in wanted.items():
            found = getattr(entry.key, name)
            if name not in key.REACH:
                if found != value:
                    break
                continue
            least, most = key.REACH[name]
            if not least * value <= found <= most * value:
                break
            distance += abs(math.log2(found / value))
            fields.append(found)
        else:
            rank = (distance, *fields)
            if best is None or rank < best[0]:
                best = rank, entry
    return None if best is None else best[1]


_active = Configurations()


def active() -> Configurations:
    """The configurations that launchers use: the shipped ones, unless :func:`use_configurations` differs."""
    return _active


@contextmanager
def use_configurations(source: Path | str) -> Iterator[Configurations]:
    """Let all launchers of this process use ``shipped``, ``defaults`` or a folder while the block runs.

    Raises:
        InputError: the folder does not exist.
    """
    global _active
    earlier, _active = _active, Configurations(source)
    try:
        yield _active
    finally:
        _active = earlier


def configuration_digests(source: Path | str, device: torch.device) -> dict[str, str]:
    """SHA-256 of every file of a source that a device uses, by its path in the folder.

    Raises:
        InputError: the folder does not exist.
    """
    folder = Configurations(source).folder
    if folder is None:
        return {}
    paths = (tuning_path(kernel, device_name(device), triton_version()) for kernel in TUNABLE)
    return {
        path.as_posix(): hashlib.sha256((folder / path).read_bytes()).hexdigest()
        for path in paths
        if (folder / path).is_file()
    }


@functools.cache
def device_name(device: torch.device) -> str:
    """The GPU that configurations are recorded for, or ``cpu`` for the interpreter."""
    return gpu_family(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


@functools.cache
def triton_version() -> str:
    """``major.minor`` of the Triton that compiles."""
    return ".".join(triton.__version__.split(".")[:2])
