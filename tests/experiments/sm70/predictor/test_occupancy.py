from __future__ import annotations

import pytest

from page4.experiments.sm70.predictor.occupancy import Occupancy, occupancy
from page4.kernels.errors import InputError


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "expected"),
    [
        (16, 0, 4, Occupancy(16, 64, "threads")),
        (168, 20000, 4, Occupancy(3, 12, "registers")),
        (255, 0, 8, Occupancy(1, 8, "registers")),
        (16, 40000, 4, Occupancy(2, 8, "bytes of shared memory")),
        (16, 0, 1, Occupancy(32, 32, "blocks")),
        # 65 registers are given as 72.
        (64, 0, 4, Occupancy(8, 32, "registers")),
        (65, 0, 4, Occupancy(7, 28, "registers")),
    ],
)
def test_blocks_of_a_multiprocessor(registers: int, shared: int, warps: int, expected: Occupancy) -> None:
    assert occupancy(registers, shared, warps) == expected


def test_a_block_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="too few bytes of shared memory"):
        occupancy(32, 97 * 1024, 4)
    with pytest.raises(InputError, match="too few registers"):
        occupancy(255, 0, 16)
