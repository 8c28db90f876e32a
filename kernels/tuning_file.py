"""Files of tuned configurations: ``FOLDER/<gpu>/triton-<major.minor>/<kernel>.json``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from page4.kernels.errors import InputError
from page4.kernels.tunable import TunableKernel, field_types

FORMAT_VERSION = 1

_FILE_FIELDS = {"format": int, "kernel": str, "gpu": str, "triton": str, "entries": list}
_ENTRY_FIELDS = {
    "key": dict,
    "config": dict,
    "median_us": float,
    "default_us": float,
    "conditions": dict,
}
_DAYS = ("measured", "predicted")  # an entry has one of them, a day


@dataclass(frozen=True)
class Entry:
    """The configuration that was fastest for a key, or was predicted to be among the fastest.

    Attributes:
        key: of the kernel's key class.
        config: of the kernel's configuration class.
        median_us, default_us: time of a call in microseconds, with this and with the default configuration.
        day: of the measurement or prediction, ``YYYY-MM-DD``.
        conditions: what else the inputs were like (context, overlap); for readers only.
        predicted: whether no GPU ever measured the times.
    """

    key: Any
    config: Any
    median_us: float
    default_us: float
    day: str
    conditions: Mapping[str, int | float | str]
    predicted: bool = False

    @property
    def basis(self) -> str:
        """What the entry rests on: ``measured`` or ``predicted``."""
        return _DAYS[self.predicted]

    def to_json(self) -> dict[str, Any]:
        """The entry in the file, which names its day after what the entry rests on."""
        return {
            "key": dataclasses.asdict(self.key),
            "config": dataclasses.asdict(self.config),
            "median_us": self.median_us,
            "default_us": self.default_us,
            self.basis: self.day,
            "conditions": dict(self.conditions),
        }


@dataclass(frozen=True)
class TuningFile:
    """What one file holds.

    Attributes:
        kernel: whose configurations they are.
        gpu: the GPU, see :func:`gpu_family`.
        triton: ``major.minor`` of the Triton that compiled them.
        entries: by key.
        sha256: of the file's bytes; empty for one that was not read from a file.
    """

    kernel: TunableKernel
    gpu: str
    triton: str
    entries: Mapping[Any, Entry]
    sha256: str = ""

    def text(self) -> str:
        """The file's text: JSON with an entry a line, in the order of the keys."""
        keys = sorted(self.entries, key=dataclasses.astuple)
        lines = [json.dumps(self.entries[key].to_json(), allow_nan=False) for key in keys]
        values = {
            "format": FORMAT_VERSION,
            "kernel": self.kernel.name,
            "gpu": self.gpu,
            "triton": self.triton,
        }
        head = json.dumps(values, indent=2)[:-2]
        body = ",\n".join(f"    {line}" for line in lines)
        return f'{head},\n  "entries": [\n{body}\n  ]\n}}\n' if lines else f'{head},\n  "entries": []\n}}\n'

    def merged(self, entries: Mapping[Any, Entry]) -> TuningFile:
        """The same file with entries added.

        Those of equal keys are replaced, but none that was measured by one that was predicted.
        """
        kept = {
            key: entry
            for key, entry in entries.items()
            if not entry.predicted or key not in self.entries or self.entries[key].predicted
        }
        return dataclasses.replace(self, entries={**self.entries, **kept}, sha256="")


def gpu_family(name: str) -> str:
    """What configurations are recorded for: the name that the driver gives, but one for every V100.

    V100s (16 and 32 GB, SXM2 and PCIe) have the same multiprocessors and differ in clocks by a few percent.
    """
    return "V100" if re.search(r"\bV100", name) else name


def gpu_slug(name: str) -> str:
    """A GPU's name as a folder: ``NVIDIA H200`` is ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def tuning_path(kernel: str, gpu: str, triton: str) -> Path:
    """Where the configurations of a kernel lie in a folder of configurations."""
    return Path(gpu_slug(gpu)) / f"triton-{triton}" / f"{kernel}.json"


def read_tuning_file(file: Path, kernel: TunableKernel) -> TuningFile:
    """The configurations of a file, every one of them possible.

    Raises:
        InputError: an unreadable file, one of another kernel, GPU or Triton than its place says, unknown or
            missing fields, wrong types, impossible or repeated entries. The message names the file.
    """
    try:
        content = file.read_bytes()
        value = json.loads(content)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    try:
        return _parse(value, file, kernel, hashlib.sha256(content).hexdigest())
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def _parse(value: Any, file: Path, kernel: TunableKernel, sha256: str) -> TuningFile:
    head = _typed(value, _FILE_FIELDS, "the file")
    if head["format"] != FORMAT_VERSION:
        raise InputError(f"format {head['format']} is not {FORMAT_VERSION}")
    if head["kernel"] != kernel.name:
        raise InputError(f"it holds configurations of {head['kernel']!r}, not of {kernel.name!r}")
    place = tuning_path(head["kernel"], head["gpu"], head["triton"])
    if file.parts[-3:] != place.parts:
        raise InputError(f"its GPU {head['gpu']!r} and Triton {head['triton']!r} belong to {place}")
    entries: dict[Any, Entry] = {}
    for number, item in enumerate(head["entries"]):
        where = f"entries[{number}]"
        try:
            entry = _entry(_typed(item, _entry_fields(item), "the entry"), kernel)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if entry.key in entries:
            raise InputError(f"{where}: the key occurs twice")
        entries[entry.key] = entry
    return TuningFile(kernel, head["gpu"], head["triton"], entries, sha256)


def _entry(item: dict[str, Any], kernel: TunableKernel) -> Entry:
    key = kernel.key(**_typed(item["key"], field_types(kernel.key), "the key"))
    config = kernel.config(**_typed(item["config"], field_types(kernel.config), "the configuration"))
    kernel.check(key, config)
    (basis,) = set(item) - set(_ENTRY_FIELDS)
    for name in ("median_us", "default_us"):
        if not (math.isfinite(item[name]) and item[name] > 0):
            raise InputError(f"{name} must be a positive number, got {item[name]}")
    try:
        date.fromisoformat(item[basis])
    except ValueError as error:
        raise InputError(f"{basis} must be a day, YYYY-MM-DD, got {item[basis]!r}") from error
    for name, value in item["conditions"].items():
        if not isinstance(value, (int, float, str)) or isinstance(value, bool):
            raise InputError(f"the condition {name!r} must be a number or text, got {value!r}")
    return Entry(
        key, config, item["median_us"], item["default_us"], item[basis], item["conditions"],
        predicted=basis == "predicted",
    )  # fmt: skip


def _entry_fields(value: Any) -> dict[str, type]:
    """The fields of an entry: of ``measured`` and ``predicted`` the one that it has.

    Raises:
        InputError: it has both or none.
    """
    days = [name for name in _DAYS if isinstance(value, dict) and name in value]
    if isinstance(value, dict) and len(days) != 1:
        raise InputError(f"the entry must have one of the fields {' and '.join(_DAYS)}")
    return {**_ENTRY_FIELDS, **dict.fromkeys(days, str)}


def _typed(value: Any, types: Mapping[str, type], what: str) -> dict[str, Any]:
    """``value``, a mapping with exactly these fields of these types."""
    if not isinstance(value, dict):
        raise InputError(f"{what} must be a mapping, got {value!r}")
    for name in value:
        if name not in types:
            raise InputError(f"{what} has an unknown field {name!r}; its fields are {', '.join(types)}")
    for name, kind in types.items():
        if name not in value:
            raise InputError(f"{what} has no field {name!r}")
        # bool is an int to isinstance, and no JSON writer tells 5.0 from 5.
        if type(value[name]) is not kind and not (kind is float and type(value[name]) is int):
            raise InputError(f"{name} must be of type {kind.__name__}, got {value[name]!r}")
    return value
