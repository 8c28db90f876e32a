"""Bars: which rows they judge, and by how much they are met or missed."""

from __future__ import annotations

from typing import Any

import pytest

from page4.experiments.bench.cells import plan_cells
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.figure import plot_shares
from page4.experiments.bench.goals import Verdict, judge
from page4.experiments.bench.measure import COLUMNS
from page4.experiments.bench.report import goals_table


def row(label: str, time: float | None, **changes: Any) -> dict[str, Any]:
    """A row of a cell with a goal, by the cell's label."""
    (cell,) = [cell for cell in plan_cells(BenchConfig(sweep="none")) if cell.label == label]
    values = dict.fromkeys(COLUMNS) | cell.columns
    values |= {"implementation": "gluon", "chosen": True, "median_us": time, "floor_fraction": None}
    return values | changes


def verdicts(*rows: dict[str, Any]) -> list[Verdict]:
    return judge(list(rows))


SMALL = "planned_attention 1 x 4, 6/1, 32k, 0.9, e4m3"


@pytest.mark.parametrize(
    ("time", "met", "text"),
    [
        (6.3, True, "<= 7 us: met by 0.7 us (10 %)"),
        (7.0, True, "<= 7 us: met by 0.0 us (0 %)"),
        (9.1, False, "<= 7 us: MISSED by 2.1 us (30 %)"),
        (None, None, "<= 7 us: not measured"),
    ],
)
def test_a_time_is_held_against_its_bar(time: float | None, met: bool | None, text: str) -> None:
    (verdict,) = verdicts(row(SMALL, time))
    assert (verdict.met, verdict.text()) == (met, text)


def test_only_what_the_model_gets_is_judged() -> None:
    assert verdicts(row(SMALL, 9.0, implementation="triton", chosen=False)) == []


@pytest.mark.parametrize(("fraction", "met"), [(0.7, True), (0.69, False), (0.95, True)])
def test_bandwidth_has_a_least_share(fraction: float, met: bool) -> None:
    (verdict,) = verdicts(row("index_scores 64 x 4, 256k", 300.0, floor_fraction=fraction))
    assert verdict.met is met
    assert verdict.text().startswith(">= 70 % of copy bandwidth: " + ("met" if met else "MISSED"))


def test_prefill_is_compared_with_the_baseline_and_with_fp16() -> None:
    label = "prefill 1 x 8192, 24/2, 8k, 0.9, {}"
    e4m3, fp16 = row(label.format("e4m3"), 100.0), row(label.format("fp16"), 80.0)
    slow = row(label.format("e4m3"), 400.0, implementation="pytorch", chosen=False)
    found = {(v.goal.quantity, v.row["kv_format"]): v for v in verdicts(e4m3, fp16, slow)}
    assert found["speedup", "e4m3"].measured == 4.0 and found["speedup", "e4m3"].met
    assert found["fp16", "e4m3"].measured == 1.25 and found["fp16", "e4m3"].met is False
    assert found["fp16", "e4m3"].text() == "<= 1 x the fp16 time: MISSED by 25 % (1.25)"
    assert found["speedup", "fp16"].met is None  # no baseline in fp16
    assert ("fp16", "fp16") not in found


def test_formats_are_compared_within_an_implementation() -> None:
    e4m3 = row(SMALL, 7.0)
    other = row(SMALL.replace("e4m3", "fp16"), 1.0, implementation="triton", chosen=False)
    assert [v.goal.quantity for v in verdicts(e4m3, other)] == ["time"]


def test_a_table_has_a_line_per_goal() -> None:
    lines = goals_table(verdicts(row(SMALL, 9.1), row("index_scores 64 x 4, 256k", None))).splitlines()
    assert lines[0] == "| kernel | shape | implementation | goal |"
    assert lines[2] == (
        "| planned_attention | 1 x 4, 6/1, 32k, 0.9, e4m3 | gluon | <= 7 us: MISSED by 2.1 us (30 %) |"
    )
    assert lines[3].endswith(">= 70 % of copy bandwidth: not measured |") and len(lines) == 4


def test_shares_are_those_of_what_the_model_gets() -> None:
    rows = [
        row(SMALL, 9.1, floor_fraction=0.25),
        row(SMALL, 20.0, floor_fraction=0.1, implementation="triton", chosen=False),
        row("index_scores 64 x 4, 256k", 300.0, floor_fraction=0.9),
        row("index_scores 64 x 4, 256k", None),
    ]
    (axes,) = plot_shares(rows).axes
    points = {line.get_label(): list(line.get_xdata()) for line in axes.lines}  # type: ignore[arg-type]
    assert (points["e4m3"], points["any"]) == ([25.0], [90.0])
