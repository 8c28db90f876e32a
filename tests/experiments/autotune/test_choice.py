"""The choice is the fastest configuration, and noise below 3 % does not change it."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from page4.experiments.autotune.choice import TIE, Trial, choose
from page4.kernels.page4_attention_gluon import GluonConfig

DEFAULT = GluonConfig(8, 64, 4)


def timed(config: GluonConfig, time: float) -> Trial:
    return Trial(config, "timed", time)


def test_the_fastest_wins_by_more_than_a_tie() -> None:
    fast = timed(GluonConfig(16, 128, 8), 10.0)
    assert choose([timed(DEFAULT, 10.4), fast], DEFAULT) == fast


def test_the_default_wins_a_tie() -> None:
    default = timed(DEFAULT, 10.29)
    assert choose([timed(GluonConfig(1, 32, 1), 10.0), default], DEFAULT) == default


def test_fewer_splits_then_fewer_warps_then_smaller_tiles_win_a_tie_without_the_default() -> None:
    trials = [
        timed(GluonConfig(2, 32, 4), 10.0),
        timed(GluonConfig(1, 128, 8), 10.2),
        timed(GluonConfig(1, 128, 4), 10.25),
        timed(GluonConfig(1, 64, 4), 10.2),
        timed(DEFAULT, 11.0),
    ]
    assert choose(trials, DEFAULT) == trials[3]
    assert choose(trials[:3], DEFAULT) == trials[2]
    assert choose(trials[:2], DEFAULT) == trials[1]


def test_what_was_not_timed_is_never_chosen() -> None:
    skipped = [
        Trial(GluonConfig(1, 32, 1), "spills", note="8 registers"),
        Trial(GluonConfig(1, 32, 2), "fails", note="PTX"),
        Trial(GluonConfig(1, 64, 2), "wrong", note="NaN"),
    ]
    assert choose(skipped, DEFAULT) is None
    assert choose([*skipped, timed(DEFAULT, 9.0)], DEFAULT) == timed(DEFAULT, 9.0)


@hypothesis.given(st.lists(st.floats(1.0, 2.0), min_size=1, max_size=12), st.randoms())
def test_the_choice_is_close_to_the_fastest_and_does_not_depend_on_the_order(
    times: list[float], random: object
) -> None:
    trials = [timed(GluonConfig(1 + i, 64, 4), time) for i, time in enumerate(times)]
    best = choose(trials, DEFAULT)
    assert best is not None and best.median_us is not None
    assert best.median_us <= min(times) * (1 + TIE)
    random.shuffle(trials)  # type: ignore[attr-defined]
    assert choose(trials, DEFAULT) == best
