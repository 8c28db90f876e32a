"""The device a study runs on."""

from __future__ import annotations

import torch

from page4.kernels.errors import InputError

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(name: str) -> torch.device:
    """The device called `name`: "auto" is a GPU where there is one; an explicit request is never replaced.

    Raises:
        InputError: The name is unknown, or "cuda" where PyTorch sees no CUDA device.
    """
    if name not in DEVICES:
        raise InputError(f"device {name!r} is unknown; choose one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' was asked for, but PyTorch sees no CUDA device; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
