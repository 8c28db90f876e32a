"""The plan of measurements: complete, without repetition, and fair to every arm."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from page4.experiments.acceptance.cells import Cell, distinct_formats, plan_cells
from page4.experiments.acceptance.config import AcceptanceConfig
from tests.experiments.acceptance.tiny_study import tiny_config


@pytest.fixture
def config() -> AcceptanceConfig:
    return tiny_config(Path("model"), Path("texts"), num_prompts=7, batch_size=3, lengths=(48, 96, 192))


def _of(cells: list[Cell], kind: str) -> list[Cell]:
    return [cell for cell in cells if cell.kind == kind]


def test_rounds_cover_every_arm_length_and_prompt_once(config: AcceptanceConfig) -> None:
    cells = _of(plan_cells(config), "rounds")
    covered = Counter((cell.arm.name, cell.length, prompt) for cell in cells for prompt in cell.prompts)
    assert len(covered) == 3 * 3 * 7 and set(covered.values()) == {1}
    assert max(len(cell.prompts) for cell in cells) == 3


def test_long_contexts_have_the_first_of_the_same_prompts_where_tokens_are_limited(
    config: AcceptanceConfig,
) -> None:
    limited = dataclasses.replace(config, prompt_tokens=400)
    cells = _of(plan_cells(limited), "rounds")
    seen = {length: {i for c in cells if c.length == length for i in c.prompts} for length in (48, 96, 192)}
    assert seen == {48: set(range(7)), 96: set(range(4)), 192: {0, 1}}
    assert dataclasses.replace(config, prompt_tokens=100).prompts_at(192) == 1


def test_arms_of_a_batch_follow_each_other(config: AcceptanceConfig) -> None:
    cells = plan_cells(config)
    for kind in ("rounds", "generation"):
        chosen = _of(cells, kind)
        for start in range(0, len(chosen), 3):
            triple = chosen[start : start + 3]
            assert len({(cell.length, cell.prompts) for cell in triple}) == 1
            assert len({cell.arm for cell in triple}) == 3


def test_every_arm_is_first_second_and_third_equally_often(config: AcceptanceConfig) -> None:
    cells = _of(plan_cells(config), "rounds")
    places = Counter((cell.arm.name, index % 3) for index, cell in enumerate(cells))
    assert set(places.values()) == {3}


def test_checks_run_once_per_pair_of_formats_at_the_shortest_length(config: AcceptanceConfig) -> None:
    cells = _of(plan_cells(config), "check")
    assert [(cell.arm.name, cell.length, cell.prompts) for cell in cells] == [
        ("fp16", 48, (0,)),
        ("e4m3", 48, (0,)),
    ]
    assert [arm.name for arm in distinct_formats(config)] == ["fp16", "e4m3"]


def test_only_short_contexts_are_continued_where_a_limit_is_set(config: AcceptanceConfig) -> None:
    limited = dataclasses.replace(config, generation_max_length=96)
    assert {cell.length for cell in _of(plan_cells(config), "generation")} == {48, 96, 192}
    assert {cell.length for cell in _of(plan_cells(limited), "generation")} == {48, 96}


def test_no_more_continuations_than_prompts() -> None:
    config = tiny_config(Path("model"), Path("texts"), num_prompts=1, generation_prompts=5, check_prompts=5)
    assert {cell.prompts for cell in plan_cells(config)} == {(0,)}
