"""The rows of a step, as the host lays them out."""

from __future__ import annotations

import pytest
import torch

from page4.kernels.errors import InputError
from page4.kernels.step_rows import StepRows

TABLES = torch.tensor([[7, 2, -1], [5, 10**9, 10**9], [0, 1, 3]])


def test_rows_of_two_requests_and_padding() -> None:
    rows = StepRows.of([15, 0], [3, 2], TABLES, requests=[0, 1], rows=6)
    assert rows.positions.tolist() == [15, 16, 17, 0, 1, -1]
    assert rows.request.tolist() == [0, 0, 0, 1, 1, -1]
    assert rows.index.tolist() == [0, 1, 2, 0, 1, 0]
    assert rows.count.tolist() == [3, 3, 3, 2, 2, 0]
    assert rows.slots.tolist() == [7 * 16 + 15, 2 * 16, 2 * 16 + 1, 5 * 16, 5 * 16 + 1, -1]
    assert [x.dtype for x in (rows.positions, rows.slots)] == [torch.int64] * 2
    assert [x.dtype for x in (rows.request, rows.index, rows.count)] == [torch.int32] * 3


def test_requests_count_up_unless_named() -> None:
    assert StepRows.of([0, 0, 32], [1, 1, 1], TABLES).slots.tolist() == [7 * 16, 5 * 16, 3 * 16]


def test_a_step_without_rows() -> None:
    assert StepRows.of([], [], TABLES).positions.shape == (0,)
    assert StepRows.of([], [], TABLES, rows=2).slots.tolist() == [-1, -1]


def test_lists_that_do_not_match_are_refused() -> None:
    with pytest.raises(InputError, match="do not match"):
        StepRows.of([0, 1], [1], TABLES)
    with pytest.raises(InputError, match="more than the 2"):
        StepRows.of([0], [3], TABLES, rows=2)
