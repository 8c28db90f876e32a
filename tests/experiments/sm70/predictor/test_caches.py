from __future__ import annotations

import numpy as np

from page4.experiments.sm70.predictor.caches import (
    ABSENT,
    dirty_cache,
    empty_caches,
    find_line,
    replace_line,
    set_of,
)


def test_sizes_are_those_asked_for() -> None:
    assert empty_caches(3, 64 * 1024, 8).shape == (3, 64, 8)
    assert empty_caches(1, 0, 8).shape == (1, 1, 8)


def test_the_oldest_line_of_a_set_is_replaced() -> None:
    lines = empty_caches(1, 128 * 2, 2)
    for line, now in ((7, 1), (8, 2)):
        way, written = replace_line(lines, 0, 0, line)
        lines[0, 0, way]["used"] = now
        assert written == 0
    lines[0, 0, find_line(lines, 0, 0, 7)]["used"] = 3
    replace_line(lines, 0, 0, 9)
    assert find_line(lines, 0, 0, 7) >= 0
    assert find_line(lines, 0, 0, 8) == -1


def test_a_new_line_has_no_sectors_and_nothing_to_write() -> None:
    lines = dirty_cache(128 * 4, 4)
    way, written = replace_line(lines, 0, 0, 5)
    assert written == 4
    assert (lines[0, 0, way]["ready"] == ABSENT).all()
    assert lines[0, 0, way]["dirty"] == 0


def test_dirty_lines_belong_to_nobody() -> None:
    lines = dirty_cache(6 * 2**20, 16)
    assert lines.size * 128 == 6 * 2**20
    assert len(np.unique(lines["tag"])) == lines.size
    assert (lines["tag"] < 0).all()


def test_strides_of_powers_of_two_reach_many_sets() -> None:
    lines = empty_caches(1, 6 * 2**20, 16)
    for stride in (1, 64, 4096, 2**20, 2**43):
        places = {set_of(lines, stride * k) for k in range(3072)}
        assert len(places) > 1500, stride
