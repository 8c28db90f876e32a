"""Safetensors files that appear whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from page4.kernels.atomic import atomic_path


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes contiguous tensors of the host under a temporary name, then renames the file.

    Raises:
        OSError: the file cannot be written, for example because the disk is full; it names the file.
    """
    with atomic_path(path) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata))
        except SafetensorError as error:
            code = re.search(r"\(os error (\d+)\)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
