from __future__ import annotations

from page4.experiments.sm70.predictor.ranking import TIE, rank_predictions


def test_a_gap_of_15_percent_decides() -> None:
    assert TIE == 0.15
    assert rank_predictions([("many registers", 10.0, 200), ("few", 11.51, 100)]) == ["many registers", "few"]


def test_a_smaller_gap_is_a_tie_that_goes_to_fewer_registers() -> None:
    assert rank_predictions([("many registers", 10.0, 200), ("few", 11.49, 100)]) == ["few", "many registers"]


def test_of_equal_registers_the_shorter_time_comes_first() -> None:
    assert rank_predictions([("b", 10.5, 128), ("a", 10.0, 128)]) == ["a", "b"]


def test_ties_are_with_the_fastest_and_do_not_chain() -> None:
    # c ties with b, b with a, but c does not tie with a.
    ranked = rank_predictions([("c", 12.0, 32), ("b", 11.0, 64), ("a", 10.0, 128), ("d", 13.0, 16)])
    assert ranked == ["b", "a", "d", "c"]


def test_nothing_ranks_nothing() -> None:
    assert rank_predictions([]) == []


def test_times_of_zero_are_ranked() -> None:
    assert rank_predictions([("a", 0.0, 10), ("b", 1.0, 5)]) == ["a", "b"]
