"""Which implementation of the hot paths runs."""

from __future__ import annotations

from typing import Literal, get_args

from page4.kernels.errors import InputError

Backend = Literal["reference", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def resolve_backend(name: str, device_type: str) -> Backend:
    """The backend called ``name``; an explicit choice never falls back to another.

    ``triton`` runs on CUDA tensors, and on CPU tensors when ``TRITON_INTERPRET=1`` was set before Triton was
    imported (slow: for tests).

    Raises:
        InputError: no such backend, Triton is not installed, or it cannot run on the device.
    """
    for backend in BACKENDS:
        if name == backend:
            break
    else:
        raise InputError(f"backend {name!r} is unknown, expected one of {', '.join(BACKENDS)}")
    if backend == "triton":
        try:
            import triton
        except ImportError as error:
            raise InputError("backend 'triton' needs Triton, which is not installed") from error
        if device_type != "cuda" and not triton.knobs.runtime.interpret:
            raise InputError(f"backend 'triton' needs a GPU, the device is {device_type}: use 'reference'")
    return backend
