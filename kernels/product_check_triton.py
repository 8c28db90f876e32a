"""A product whose result is known, before the others are believed.

Some releases of Triton returned zeros from FP16 products on compute capability 7.0, in silence.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.errors import InputError

SIZE = 32


@triton.jit
def product_kernel(p_a, p_b, p_c, N: tl.constexpr):
    """``C = A B`` of FP16 ``[N, N]`` with FP32 sums, as attention computes it."""
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(p_c + o, tl.dot(tl.load(p_a + o), tl.load(p_b + o)))


def known_factors(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Small integers in FP16: every sum of their products is exact, in any order."""
    element = torch.arange(SIZE * SIZE, device=device).view(SIZE, SIZE)
    return ((element * 7 % 11) - 5).half(), ((element * 5 % 13) - 6).half()


def check_result(got: Tensor, device: torch.device | str) -> None:
    """Refuse a product of the known factors that is not exact.

    Raises:
        InputError: it is not.
    """
    a, b = known_factors("cpu")
    if not torch.equal(got.cpu(), a.float() @ b.float()):
        raise InputError(
            f"Triton {triton.__version__} multiplies FP16 matrices wrongly on {device}; "
            "use another release of Triton, or the backend 'reference'"
        )


@cache
def check_products(device: torch.device) -> None:
    """Multiply the known factors on ``device`` once in a process.

    Raises:
        InputError: the product is wrong: no kernel's result could be believed.
    """
    a, b = known_factors(device)
    got = torch.empty(SIZE, SIZE, device=device)
    product_kernel[(1,)](a, b, got, SIZE, num_warps=4)
    check_result(got, device)
