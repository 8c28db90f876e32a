"""The folder of one study's results: it belongs to one configuration, and its files appear atomically."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import yaml

from page4.experiments.atomic import atomic_path, is_leftover, remove_leftovers, write_json, write_text
from page4.experiments.config import DataclassInstance, config_hash, config_to_dict
from page4.experiments.png import with_palette
from page4.experiments.provenance import collect_provenance, now
from page4.experiments.samples import SampleStore, write_csv
from page4.experiments.strict_yaml import parse_yaml
from page4.kernels.errors import InputError
from page4.kernels.folder_lock import lock_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG_FILE = "config.yaml"
INPUTS_FILE = "inputs.json"
PROVENANCE_FILE = "provenance.json"
LOCK_FILE = ".lock"


class ResultFolder:
    """A context manager around the folder that a study writes to.

        with ResultFolder(out, config, inputs={"checkpoint": sha256}) as folder:
            samples = folder.samples({"prompt": str, "accepted": int}, key=("prompt",))
            ...
            folder.write_json("summary.json", summary)
            folder.finish()

    Entering creates the folder, locks it against others, and writes `config.yaml` and `inputs.json`.
    A folder that exists is taken up again when both agree with what is there. `provenance.json` grows with
    every run.

    Args:
        out: The folder.
        config: The study's configuration, with every choice of "auto" made: what was run is compared.
        inputs: Name -> digest of data that the configuration only points to: the checkpoint, the prompts.

    Raises:
        InputError: On entering, when the folder belongs to another configuration or other inputs (the message
            names the keys that differ), holds files that are no results, or is in use by another process.
    """

    def __init__(self, out: Path, config: DataclassInstance, inputs: Mapping[str, str] | None = None) -> None:
        self.path = Path(out)
        self.config = config
        self.inputs = dict(inputs or {})
        self._lock: IO[str] | None = None
        self._runs: list[dict[str, Any]] = []

    def __enter__(self) -> ResultFolder:
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; --out needs a folder")
        self._check_owner()  # before anything is written
        self.path.mkdir(parents=True, exist_ok=True)
        self._acquire_lock()
        try:
            remove_leftovers(self.path)
            if not self._check_owner():  # another process may have taken the folder in between
                write_json(self.path / INPUTS_FILE, self.inputs)
                text = yaml.safe_dump(config_to_dict(self.config), sort_keys=False)
                write_text(self.path / CONFIG_FILE, text)
            self._runs = [*self._earlier_runs(), {"started": now(), "finished": None} | collect_provenance()]
            self._write_provenance()
        except BaseException:
            self._release_lock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release_lock()

    def samples(
        self, columns: Mapping[str, type], key: Sequence[str], name: str = "samples.csv"
    ) -> SampleStore:
        """The rows measured so far, ready to be added to."""
        return SampleStore(self.path / name, columns, key)

    def write_text(self, name: str, text: str) -> Path:
        """Write UTF-8 text atomically; returns the path."""
        write_text(self.path / name, text)
        return self.path / name

    def write_json(self, name: str, value: Any) -> Path:
        """Write JSON atomically; returns the path. NaN and infinities are refused (ValueError)."""
        write_json(self.path / name, value)
        return self.path / name

    def write_csv(self, name: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Path:
        """Write a table atomically; returns the path."""
        write_csv(self.path / name, rows, columns)
        return self.path / name

    def write_figure(self, name: str, figure: Figure, dpi: int = 150) -> Path:
        """Write a Matplotlib figure atomically, in the format of the name's suffix; returns the path.

        A PNG gets a palette.
        """
        with atomic_path(self.path / name) as temporary:
            figure.savefig(temporary, dpi=dpi, bbox_inches="tight")
            if temporary.suffix == ".png":
                temporary.write_bytes(with_palette(temporary.read_bytes()))
        return self.path / name

    def finish(self, **extra: Any) -> Path:
        """Note in `provenance.json` that this run has ended, with whatever else is to be said of it.

        The file lists every run that wrote to the folder, from its start on: an interrupted run may have left
        samples of another version or machine than the run that finished the study.
        """
        self._runs[-1] |= {"finished": now()} | extra
        return self._write_provenance()

    def _write_provenance(self) -> Path:
        record = {"config_hash": config_hash(self.config), "inputs": self.inputs, "runs": self._runs}
        return self.write_json(PROVENANCE_FILE, record)

    def _earlier_runs(self) -> list[dict[str, Any]]:
        file = self.path / PROVENANCE_FILE
        if not file.exists():
            return []
        try:
            runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
            if not isinstance(runs, list):
                raise TypeError("runs are a list")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{file} is not the record of a study; give --out another folder") from error
        return runs

    def _check_owner(self) -> bool:
        """Whether this configuration owns the folder already; False when the folder is new or empty."""
        file = self.path / CONFIG_FILE
        if not file.exists():
            others = list(self.path.iterdir()) if self.path.exists() else []
            if any(item.name not in (LOCK_FILE, INPUTS_FILE) and not is_leftover(item) for item in others):
                raise InputError(
                    f"{self.path} is not empty and holds no {CONFIG_FILE}; give --out a new folder"
                )
            return False
        try:
            config = parse_yaml(file.read_text(encoding="utf-8"))
            inputs = parse_yaml((self.path / INPUTS_FILE).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InputError(f"{self.path} holds no readable {CONFIG_FILE} and {INPUTS_FILE}") from error
        differing = _differing_keys(config, config_to_dict(self.config)) + _differing_keys(
            inputs, self.inputs
        )
        if differing:
            raise InputError(
                f"{self.path} belongs to another configuration (it differs in {', '.join(differing)}); "
                "give --out another folder or delete this one"
            )
        return True

    def _acquire_lock(self) -> None:
        busy = f"{self.path} is in use by another process; wait for it or give another --out"
        self._lock = lock_folder(self.path / LOCK_FILE, busy)

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _differing_keys(saved: Any, current: Mapping[str, Any]) -> list[str]:
    """Dotted names of the keys whose values differ."""
    if not isinstance(saved, dict):
        return list(current)
    differing: list[str] = []
    for key in sorted(saved.keys() | current.keys(), key=str):
        old, new = saved.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differing += [f"{key}.{name}" for name in _differing_keys(old, new)]
        elif old != new or (key in saved) != (key in current):
            differing.append(str(key))
    return differing
