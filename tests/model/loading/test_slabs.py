"""Slabs cover a matrix once, in whole multiples, and are no larger than they have to be."""

from __future__ import annotations

import pytest

from page4.model.loading.slabs import slabs


@pytest.mark.parametrize(
    ("rows", "columns", "multiple"),
    [
        (12_288, 2560, 1),
        (12_288, 2560, 128),
        (2560, 12_288, 32),
        (5, 10**7, 1),
        (300, 7, 128),
        (1, 1, 32),
        (0, 4, 1),
    ],
)
def test_slabs(rows: int, columns: int, multiple: int) -> None:
    found = list(slabs(rows, columns, multiple))
    assert [row for start, stop in found for row in range(start, stop)] == list(range(rows))
    assert all(start % multiple == 0 for start, _ in found)
    assert all((stop - start) * columns <= max(2**17, multiple * columns) for start, stop in found)
    assert len(found) <= 2 + rows * columns // 2**16 + rows // multiple
