"""Programmatic dependent launch: a kernel starts while the one before it ends.

Small steps are a chain of short kernels, and between two of them a GPU idles about a microsecond: it drains
the first before it starts the second. A dependent kernel is started as soon as all blocks of the one before
have let it, and waits until that one has finished and its writes are seen.

Kernels wait first and let the next one start then: otherwise those two and three launches ahead would take
places on the multiprocessors while the first still runs, and spread unevenly. The attention kernels, which
fill their multiprocessors for long, let it start when their loop is over.

Every kernel that is launched so waits before its first access to memory. So it also comes after everything
that the kernel before it had waited for, and needs to know nothing about its neighbours.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_dependent(DEPENDENT: tl.constexpr):
    """Wait for the previous kernel, then let the next one start; the first statement of a kernel."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@cache
def launches_dependents(device: torch.device) -> bool:
    """Whether kernels on a device are launched so: on CUDA from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
