"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from page4.kernels.errors import InputError


def lock_folder(file: Path, busy: str) -> IO[str]:
    """Lock a file, made unless it is there, until the result is closed or the process ends.

    The empty file stays: removing it could leave two owners.

    Raises:
        InputError: another process holds it; the message is `busy`.
    """
    lock = file.open("a")  # whatever is there under this name stays
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise InputError(busy) from None
    return lock
