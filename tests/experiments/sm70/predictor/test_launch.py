from __future__ import annotations

import numpy as np
import pytest

from page4.experiments.sm70.predictor.launch import (
    EVENT,
    SECTOR,
    Traces,
    affine_grid,
    copied_grid,
    sample_blocks,
)


def traces(*blocks: list[tuple[int, list[int]]]) -> Traces:
    """Of blocks with one warp; an event is (instruction, sectors)."""
    starts = np.cumsum([0, *map(len, blocks)])
    events = np.zeros(starts[-1] + 1, EVENT)
    executed = [event for block in blocks for event in block]
    events["instruction"][:-1] = [instruction for instruction, _ in executed]
    events["first_sector"] = np.cumsum([0, *(len(sectors) for _, sectors in executed)])
    sectors = np.zeros(events["first_sector"][-1], SECTOR)
    sectors["address"] = [sector for _, touched in executed for sector in touched]
    return Traces(starts, events, sectors)


def addresses(traces: Traces, block: np.void) -> list[int]:
    """Where a block goes."""
    first, last = traces.warp_start[block["trace"]], traces.warp_start[block["trace"] + 1]
    touched = traces.sectors[traces.events["first_sector"][first] : traces.events["first_sector"][last]]
    return [int(s["address"] + block["x"] * s["step_x"] + block["y"] * s["step_y"]) for s in touched]


def test_a_sample_is_spread_over_all_blocks() -> None:
    assert sample_blocks(4, 8).tolist() == [0, 1, 2, 3]
    assert sample_blocks(100, 4).tolist() == [12, 37, 62, 87]


def test_repetitions_along_x_share_memory_among_their_blocks_only() -> None:
    # Two requests are traced, with two splits (z) each that read one word of their own request.
    sampled = np.arange(4)  # places (x, z) = (0, 0), (1, 0), (0, 1), (1, 1)
    made = traces([(0, [10])], [(0, [20])], [(0, [10])], [(0, [20])])
    whole, blocks = copied_grid(made, sampled, (4, 1, 2), axis=0, part=2)
    assert blocks["trace"].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    touched = [addresses(whole, block)[0] for block in blocks]
    assert touched[:2] == [10, 20]
    assert touched[:4] == touched[4:]  # both splits of a request
    assert len(set(touched)) == 4  # four requests


def test_blocks_that_were_not_sampled_run_the_nearest_trace_on_memory_of_their_own() -> None:
    whole, blocks = copied_grid(traces([(0, [5])], [(1, [5])]), np.array([1, 4]), (6, 1, 1), axis=0, part=6)
    assert blocks["trace"].tolist() == [0, 0, 0, 1, 1, 1]
    touched = [addresses(whole, block)[0] for block in blocks]
    assert touched[1] == touched[4] == 5  # what was traced stays where it was
    assert len(set(touched)) == 5


def test_requests_may_be_counted_along_any_axis() -> None:
    made = traces([(0, [10])], [(0, [20])], [(0, [30])])
    whole, blocks = copied_grid(made, np.arange(3), (3, 2, 1), axis=1, part=1)
    assert blocks["trace"].tolist() == [0, 1, 2, 0, 1, 2]
    assert len({addresses(whole, block)[0] for block in blocks}) == 6


def test_an_affine_grid_follows_both_axes() -> None:
    made = traces([(0, [100, 200])], [(0, [101, 200])], [(0, [100, 264])])
    whole, blocks = affine_grid(made, 1, (3, 2))
    assert [addresses(whole, block) for block in blocks] == [
        [100, 200], [101, 200], [102, 200], [100, 264], [101, 264], [102, 264],
    ]  # fmt: skip


def test_an_affine_grid_needs_blocks_that_do_the_same() -> None:
    with pytest.raises(ValueError, match="same instructions"):
        affine_grid(traces([(0, [1])], [(1, [1])], [(0, [1])]), 1, (2, 2))
    with pytest.raises(ValueError, match="same instructions"):
        affine_grid(traces([(0, [1])], [(0, [1, 2])], [(0, [1])]), 1, (2, 2))
