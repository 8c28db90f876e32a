"""``mma.m8n8k4`` of compute capability 7.0 for :mod:`tests.kernels.ptx_emulator`, from the PTX ISA's figures.

The quad-pairs of a warp, lanes 4 i to 4 i + 3 and the same 16 further up, multiply a matrix each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _quad_pairs(x: Array) -> Array:
    """Values ``[threads, ...]`` as ``[warp, quad-pair, eight lanes, ...]``."""
    return x.reshape(-1, 2, 4, 4, *x.shape[1:]).swapaxes(1, 2).reshape(-1, 4, 8, *x.shape[1:])


def quad_pair_product(left: Array, right: Array, before: Array, columns: bool) -> Array:
    """``left x right + before`` in FP32, registers ``[threads, 8]``; sums are rounded once.

    ``left`` and ``right`` are 32-bit registers ``[threads, 2]``. ``columns``: the layout of ``right`` is
    ``.row``, whose lanes hold four columns of a row, and not ``.col``, whose lanes hold a column.
    """
    a, b = (_quad_pairs(x.view(np.float16)).astype(np.float64) for x in (left, right))  # [w, q, lane, 4]
    # Lane l of the first four holds columns 0 to 3 of row l, the four others have columns 4 to 7.
    rows = b.reshape(-1, 4, 2, 4, 4).swapaxes(2, 3).reshape(-1, 4, 4, 8)
    b = rows if columns else b.swapaxes(2, 3)
    lane, register = np.arange(8)[:, None], np.arange(8)
    row = lane % 2 + register // 2 % 2 * 2 + lane // 4 * 4
    column = register // 4 * 4 + lane // 2 % 2 * 2 + register % 2
    after = (a @ b)[:, :, row, column] + _quad_pairs(before.view(np.float32))  # [w, q, lane, register]
    after = after.reshape(-1, 4, 2, 4, 8).swapaxes(1, 2)
    return np.ascontiguousarray(after.reshape(-1, 8).astype(np.float32))
