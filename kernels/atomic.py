"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that takes the name `path` when the block ends normally.

    The temporary file keeps the suffix, so that libraries that choose a format by it work. It is removed when
    the block raises, and `path` keeps its earlier content then. A process that is killed leaves it behind:
    :func:`is_leftover` knows it.

    Raises:
        OSError: it cannot be written; the error names `path` where the system names nothing (a full disk).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.stem}{_MARK}"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


_MARK = ".partial-"
_RANDOM = "[a-z0-9_]{8}"
_LEFTOVER = re.compile(rf"\..+{re.escape(_MARK)}{_RANDOM}(\.\w+)?")


def is_leftover(file: Path) -> bool:
    """Whether a file is one that :func:`atomic_path` was writing, by its name."""
    return _LEFTOVER.fullmatch(file.name) is not None


def remove_leftovers(folder: Path, of: Path | None = None) -> None:
    """Removes what killed processes were writing to a folder; with ``of``, in place of this file of it only.

    Nobody else may be writing there now.
    """
    for file in folder.iterdir():
        if _replaces(file, of) if of is not None else is_leftover(file):
            file.unlink()


def _replaces(leftover: Path, path: Path) -> bool:
    pattern = rf"\.{re.escape(path.stem + _MARK)}{_RANDOM}{re.escape(path.suffix)}"
    return re.fullmatch(pattern, leftover.name) is not None


def _umask() -> int:
    """The process's file mode mask, which mkstemp does not apply."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
