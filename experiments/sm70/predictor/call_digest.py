"""What decides the predicted time of a call, as a digest: a prediction counts until that changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from torch import Tensor

from page4.experiments.sm70 import binary_cache
from page4.experiments.sm70.launches import Launch
from page4.experiments.sm70.predictor import step
from page4.experiments.sm70.predictor.call import CAPABILITY, launches_on_v100
from page4.experiments.sm70.toolchain import VERSION
from page4.kernels.errors import InputError

_SM70 = Path(__file__).resolve().parents[1]
_MODEL = (
    _SM70 / "emulator", _SM70 / "predictor", _SM70 / "assembly.py", _SM70 / "trace.py",
    _SM70.parent / "kernel_cases.py", _SM70.parent / "verify_cases.py",
    _SM70.parent / "gated_delta_cases.py",
)  # fmt: skip
_LENGTH = 16  # hexadecimal digits


def call_digest(call: Callable[[], object]) -> str:
    """Digest of all that a call launches on a V100, with the code behind it, and of the model of the V100.

    Grids, numbers, and what is compiled with its sources count; values and sizes of tensors do not, but for
    what the launcher makes of them, and neither does how launches are recorded and compiled. "refused" where
    the call refuses its inputs.
    """
    try:
        launches = launches_on_v100(call)
    except InputError:
        return "refused"
    digest = hashlib.sha256(_model_digest())
    for launch in launches:
        digest.update(_of_launch(launch).encode())
    return digest.hexdigest()[:_LENGTH]


def _of_launch(launch: Launch) -> str:
    job = launch.job(CAPABILITY)
    sources = [_sha256(file) for file in binary_cache.source_files(job.source)]
    numbers = {name: value for name, value in launch.arguments.items() if not isinstance(value, Tensor)}
    return json.dumps([job.request, sources, list(launch.grid), numbers], default=str, sort_keys=True)


@cache
def _model_digest() -> bytes:
    """SHA-256 of the emulator, the model and the code that makes inputs; not of kernels."""
    digest = hashlib.sha256(VERSION.encode())
    for file in model_files():
        digest.update(_sha256(file).encode())
    return digest.digest()


def model_files() -> list[Path]:
    """The files of the emulator, the model and the code that makes inputs."""
    files = binary_cache.source_files(Path(step.__file__).resolve())
    return [file for file in files if any(file.is_relative_to(place) for place in _MODEL)]


@cache
def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
