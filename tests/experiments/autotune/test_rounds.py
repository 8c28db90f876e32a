"""Every tile is tried, then the fastest tiles with every number of splits."""

from __future__ import annotations

import itertools

import hypothesis
from hypothesis import strategies as st

from page4.experiments.autotune.choice import Trial
from page4.experiments.autotune.rounds import first_round, next_round, tile_of
from page4.kernels.page4_attention_triton import AttentionConfig
from page4.kernels.qsa_prepare_triton import PrepareConfig

SPLITS, TILES, WARPS = (1, 3, 8, 20), (16, 32, 64), (4, 8)
CONFIGS = [AttentionConfig(*fields, 2) for fields in itertools.product(SPLITS, TILES, WARPS)]


def test_the_first_round_has_every_tile_once_with_splits_near_the_default() -> None:
    default = AttentionConfig(7, 64, 4, 2)
    first = first_round(CONFIGS, default)
    assert first[0] == default
    assert {config.splits for config in first[1:]} == {8}
    assert {tile_of(config) for config in first[1:]} == {tile_of(config) for config in CONFIGS}
    assert len(first) == 1 + len(TILES) * len(WARPS)


def test_the_second_round_has_the_three_fastest_tiles_with_their_other_splits() -> None:
    first = first_round(CONFIGS, CONFIGS[0])
    trials = [Trial(config, "timed", float(config.tile_tokens + config.num_warps)) for config in first]
    second = next_round(CONFIGS, trials)
    assert {(config.tile_tokens, config.num_warps) for config in second} == {(16, 4), (16, 8), (32, 4)}
    assert len(second) == 3 * (len(SPLITS) - 1)
    assert not set(first) & set(second)


def test_tiles_that_could_not_be_timed_are_not_tried_again() -> None:
    first = first_round(CONFIGS, CONFIGS[0])
    trials = [Trial(config, "spills") for config in first[1:]] + [Trial(first[0], "timed", 5.0)]
    assert {tile_of(config) for config in next_round(CONFIGS, trials)} == {tile_of(first[0])}
    assert next_round(CONFIGS, [Trial(config, "fails") for config in first]) == []


@hypothesis.given(st.randoms())
def test_after_two_rounds_nothing_is_left_whatever_the_times(random: object) -> None:
    def time_all(configs: list[AttentionConfig]) -> list[Trial]:
        return [Trial(config, "timed", random.uniform(1, 9)) for config in configs]  # type: ignore[attr-defined]

    trials = time_all(first_round(CONFIGS, CONFIGS[5]))
    second = time_all(next_round(CONFIGS, trials))
    assert second
    assert next_round(CONFIGS, trials + second) == []


def test_configurations_without_splits_are_all_tried_at_once() -> None:
    configs = [PrepareConfig(rows) for rows in (1, 2, 4)]
    first = first_round(configs, configs[1])
    assert first == [configs[1], configs[0], configs[2]]
    assert next_round(configs, [Trial(config, "timed", 5.0) for config in first]) == []
