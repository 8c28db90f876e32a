"""Compiled kernels on the disk, found by a digest of all that decides what they become."""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib.util
import json
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from page4.experiments.atomic import atomic_path

FOLDER = Path(".cache/sm70")
_WORKER = Path(__file__).with_name("compile_worker.py")


def digest(request: dict[str, Any], source: Path, version: str) -> str:
    """SHA-256 of a request, of the Triton that compiles it, and of the source files behind the kernel.

    Those are the kernel's own file and every module of page4 that it imports, directly or not.
    """
    key = hashlib.sha256(json.dumps([version, request], sort_keys=True).encode())
    for content in (_digest_of(_WORKER), *(_digest_of(file) for file in source_files(source))):
        key.update(content)
    return key.hexdigest()


@cache
def source_files(source: Path) -> tuple[Path, ...]:
    """A file and the files of all modules of page4 that it imports, directly or not; sorted."""
    found, waiting = {source}, [source]
    while waiting:
        for file in _imported_files(waiting.pop()):
            if file not in found:
                found.add(file)
                waiting.append(file)
    return tuple(sorted(found))


def has(key: str, folder: Path = FOLDER) -> bool:
    """Whether something was kept under a key."""
    return _place(key, folder).is_file()


def read(key: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """What :func:`write` kept under a key; None where there is nothing, or nothing readable."""
    try:
        value: dict[str, Any] = json.loads(gzip.decompress(_place(key, folder).read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    return value


def write(key: str, value: dict[str, Any], folder: Path = FOLDER) -> None:
    """Keep a value of JSON types under a key."""
    with atomic_path(_place(key, folder)) as temporary:
        temporary.write_bytes(gzip.compress(json.dumps(value).encode(), 6))


def _place(key: str, folder: Path) -> Path:
    return folder / f"{key}.json.gz"


@cache
def _digest_of(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def _imported_files(file: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found = [_module_file(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            found = [_file_at(base), *(_file_at(base / alias.name) for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [_module_file(name) for name in (str(node.module), *names)]
        else:
            continue
        yield from filter(None, found)


@cache
def _module_file(name: str) -> Path | None:
    """The file of a module of page4; None for other modules and for what is no module."""
    if not name.startswith("page4."):
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # an attribute of a module was asked for
        return None
    return Path(spec.origin).resolve() if spec and spec.origin else None


def _file_at(path: Path) -> Path | None:
    """The module or package at a path without its suffix."""
    places = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((place.resolve() for place in places if place.is_file()), None)
