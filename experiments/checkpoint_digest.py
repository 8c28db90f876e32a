"""One number for the files of a checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

from page4.model.kv_scales import describe_base


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over the digests of config and weights, in hexadecimal.

    Raises:
        InputError: the folder holds no checkpoint.
    """
    return hashlib.sha256(repr(sorted(describe_base(folder).files.items())).encode()).hexdigest()
