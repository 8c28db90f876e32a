"""Which implementation of the hot paths runs."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from page4.kernels.errors import InputError

Backend = Literal["reference", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def resolve_backend(name: str, device_type: str) -> Backend:
    """The backend called ``name``; an explicit choice never falls back to another.

    ``triton`` runs on CUDA tensors, and on CPU tensors when ``TRITON_INTERPRET=1`` was set before Triton was
    imported (slow: for tests).

    On a GPU without tensor cores that Triton uses (before compute capability 8.0), a product whose result is
    known is computed first.

    Raises:
        InputError: no such backend, Triton is not installed, it cannot run on the device, or it multiplies
            wrongly there.
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
        if (
            device_type == "cuda"
            and torch.cuda.is_available()
            and torch.cuda.get_device_capability() < (8, 0)
        ):
            from page4.kernels.product_check_triton import check_products

            check_products(torch.device("cuda", torch.cuda.current_device()))
    return backend
