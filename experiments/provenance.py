"""Where a result comes from: versions, hardware, source and command."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("page4", "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "matplotlib")
FOLDERS = ("kernels", "kvcache", "model", "spec_decode", "experiments")


def collect_provenance() -> dict[str, Any]:
    """The conditions under which a result was measured, without machine paths."""
    return {
        "command": command_line(sys.argv),
        "source": source_version(),
        "versions": package_versions(),
        "hardware": hardware(),
    }


def now() -> str:
    """The time in UTC, to the second, by ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def package_versions() -> dict[str, str | None]:
    """Version of Python and of every package that matters; None when it is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def hardware() -> dict[str, Any]:
    """The processor and, when CUDA is available, each GPU with its memory (bytes), capability and driver."""
    import torch  # slow to import, and not needed by the other parts of this file

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return {
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": gpus,
    }


def source_version() -> dict[str, Any]:
    """Commit, whether tracked files differ from it, and a digest of the package's code.

    An archive that `git archive` made knows its commit, though not whether it is as it was. The commit is
    None anywhere else outside a checkout, where the digest still tells versions apart: SHA-256 over the names
    and contents of every Python file of the five packages, in the order of their names.
    """
    commit = _git("rev-parse", "HEAD") or _archived_commit()
    return {"commit": commit, "dirty": _dirty(), "code_sha256": _code_digest()}


def command_line(arguments: list[str]) -> str:
    """The command with its program and every absolute path reduced to what means something elsewhere."""
    words = [Path(arguments[0]).name, *(_without_machine_path(word) for word in arguments[1:])]
    return shlex.join(words)


def _without_machine_path(word: str) -> str:
    option, equals, value = word.rpartition("=")
    if not Path(value).is_absolute():
        return word
    path = Path(os.path.normpath(value))
    inside = path.is_relative_to(Path.cwd())
    return option + equals + (path.relative_to(Path.cwd()).as_posix() if inside else path.name)


def _root() -> Path:
    """The folder above this package: the checkout, when there is one."""
    return Path(__file__).resolve().parent.parent


def _git(*arguments: str) -> str | None:
    if not (_root() / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=_root(), capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _archived_commit() -> str | None:
    """What `git archive` wrote in the place of `$Format:%H$`."""
    file = _root() / ".git_archival.txt"
    found = (
        re.match(r"node: ([0-9a-f]{40})$", file.read_text(encoding="utf-8").strip())
        if file.exists()
        else None
    )
    return found and found[1]


def _dirty() -> bool | None:
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else status != ""


def _code_digest() -> str:
    digest = hashlib.sha256()
    files = (file for folder in FOLDERS for file in (_root() / folder).rglob("*.py"))
    for file in sorted(files, key=lambda file: file.relative_to(_root()).as_posix()):
        digest.update(file.relative_to(_root()).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
