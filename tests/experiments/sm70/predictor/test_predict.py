from __future__ import annotations

import numpy as np
import pytest

from page4.experiments.sm70.predictor.machine import V100
from page4.experiments.sm70.predictor.pipes import Pipe
from page4.experiments.sm70.predictor.predict import Geometry, resource_shares
from page4.experiments.sm70.predictor.sm_model import Replay
from page4.kernels.errors import InputError


def test_all_blocks_of_a_small_launch_are_emulated() -> None:
    assert Geometry((2, 1, 2), 4, 0).sample() == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]


def test_only_the_part_with_data_is_emulated() -> None:
    geometry = Geometry((64, 2, 2), 4, 0, part=1)
    assert geometry.sample() == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    assert geometry.blocks == 256


def test_data_may_be_a_part_along_any_axis() -> None:
    assert Geometry((3, 8, 1), 4, 0, axis=1, part=1).sample() == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


def test_a_large_launch_is_sampled_everywhere() -> None:
    sample = Geometry((100, 1, 3), 4, 0, most_blocks=6).sample()
    assert len(sample) == 6
    assert {z for _, _, z in sample} == {0, 1, 2}


@pytest.mark.parametrize("wrong", [{"part": 5}, {"warps": 0}, {"most_blocks": 0}, {"grid": (0, 1, 1)}])
def test_what_is_no_launch_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match="no launch"):
        Geometry(**{"grid": (4, 1, 1), "warps": 4, "shared_bytes": 0} | wrong)  # type: ignore[arg-type]


def test_shares_are_of_what_the_machine_could_do() -> None:
    busy = np.zeros(len(Pipe))
    busy[Pipe.TENSOR] = 0.25
    cycles = 1_530_000  # a millisecond
    counted = Replay(cycles, 4 * 80 * cycles // 2, tuple(busy), 0.0, 2_155_000, 400_000_000, 26_000_000)
    shares = resource_shares(counted, V100)
    assert shares["TENSOR"] == 0.25
    assert shares["issue"] == pytest.approx(0.5)
    assert shares["L2"] == pytest.approx(0.001)
    assert shares["DRAM"] == pytest.approx(0.5)
