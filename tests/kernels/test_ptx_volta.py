"""``mma.m8n8k4`` in the emulator, against matrices that are filled element by element as the PTX ISA says."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.ptx_volta import quad_pair_product

THREADS = 64


def quad_pair(thread: int) -> tuple[int, int, int]:
    """Warp, quad-pair, and lane of a thread."""
    lane = thread % 32
    return thread // 32, lane // 4 % 4, lane


@pytest.mark.parametrize("columns", [False, True])
def test_every_quad_pair_multiplies_its_own_matrices(columns: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, (THREADS, 4)).astype(np.float16) for _ in range(2))
    c = rng.integers(-99, 99, (THREADS, 8)).astype(np.float32)
    left, right = np.zeros((2, 4, 8, 4)), np.zeros((2, 4, 4, 8))
    for thread in range(THREADS):
        warp, pair, lane = quad_pair(thread)
        upper = 4 if lane >= 16 else 0
        for i in range(4):
            left[warp, pair, lane % 4 + upper, i] = a[thread, i]
            row, column = (lane % 4, i + upper) if columns else (i, lane % 4 + upper)
            right[warp, pair, row, column] = b[thread, i]
    expected = np.zeros((THREADS, 8), np.float32)
    for thread in range(THREADS):
        warp, pair, lane = quad_pair(thread)
        for i in range(8):
            row = (lane & 1) + (4 if lane >= 16 else 0) + (2 if i & 2 else 0)
            column = (i & 4) + (lane & 2) + (i & 1)
            expected[thread, i] = c[thread, i] + left[warp, pair, row] @ right[warp, pair, :, column]
    got = quad_pair_product(a.view(np.uint32), b.view(np.uint32), c.view(np.uint32), columns)
    np.testing.assert_array_equal(got, expected)
