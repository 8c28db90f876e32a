from __future__ import annotations

from dataclasses import replace

from page4.experiments.kernel_cases import StepShape
from page4.experiments.sm70.prediction.config import PredictConfig
from page4.experiments.sm70.prediction.goals import Verdict, judge
from tests.experiments.sm70.prediction.predicted_rows import predicted

STEP = StepShape(requests=16, rows=4, query_heads=6, kv_heads=1, context=8192, overlap=0.9, kv_format="e4m3")
WIDE = replace(STEP, query_heads=24, kv_heads=2)
USUAL = PredictConfig()


def verdicts(*rows: dict[str, object]) -> dict[str, Verdict]:
    return {verdict.what: verdict for verdict in judge(rows, USUAL)}


def test_times_are_compared_with_their_bars() -> None:
    assert verdicts(predicted(STEP, "gluon", 36.0))["microseconds"].met
    assert not verdicts(predicted(STEP, "gluon", 36.1))["microseconds"].met
    assert verdicts(predicted(replace(STEP, requests=64), "gluon", 115.0))["microseconds"].met
    assert not judge([predicted(replace(STEP, requests=2), "gluon", 1.0)], USUAL)


def test_plain_triton_is_no_goal_but_a_measure() -> None:
    found = verdicts(predicted(STEP, "gluon", 10.0), predicted(STEP, "triton", 79.0))
    assert set(found) == {"microseconds", "time of plain tl.dot over it"}
    assert not found["time of plain tl.dot over it"].met
    found = verdicts(predicted(STEP, "gluon", 10.0), predicted(STEP, "triton", 80.0))
    assert found["time of plain tl.dot over it"].met


def test_wide_heads_are_compared_with_small_ones() -> None:
    found = verdicts(predicted(STEP, "gluon", 30.0), predicted(WIDE, "gluon", 67.0))
    verdict = found["time over that of 6/1 heads"]
    assert not verdict.met
    assert verdict.cells() == (
        "16 x 4, 24/2, e4m3",
        "time over that of 6/1 heads",
        "<= 2.2",
        "2.23",
        "MISSED",
    )
    assert "time over that of 6/1 heads" not in verdicts(predicted(WIDE, "gluon", 67.0))


def test_byte_formats_are_compared_with_fp16() -> None:
    half, other = replace(STEP, kv_format="fp16"), replace(STEP, kv_format="e5m2")
    found = verdicts(predicted(half, "gluon", 50.0), predicted(other, "gluon", 50.1))
    assert not found["time over that of fp16"].met


def test_one_row_is_compared_with_its_floor() -> None:
    step = replace(STEP, rows=1, requests=64)
    assert verdicts(predicted(step, "gluon", 26.0, floor_us=20.0))["time over its floor"].met
    assert not verdicts(predicted(step, "gluon", 27.0, floor_us=20.0))["time over its floor"].met


def test_other_steps_have_no_goals() -> None:
    assert not judge([predicted(STEP, "gluon", 36.0)], replace(USUAL, topk=64))


def test_rows_without_a_time_are_not_judged() -> None:
    row = predicted(STEP, "gluon", 36.0) | {"predicted_us": None}
    assert not judge([row], USUAL)
