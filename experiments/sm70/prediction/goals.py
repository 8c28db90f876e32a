"""What is asked of a V100, and what the predictions say of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from page4.experiments.samples import Row
from page4.experiments.sm70.prediction.cells import CELL_COLUMNS, cell_label
from page4.experiments.sm70.prediction.config import PredictConfig

TIMES_US = {1: 5.5, 4: 14.0, 16: 36.0, 64: 115.0}
"""Most microseconds of attention and merge by requests: e4m3, 4 rows, 6/1 heads."""

WIDE_HEADS = 2.2
"""Most time of 24/2 heads over that of 6/1."""

DECODE_OVER_FLOOR = 1.3
"""Most time of 64 requests of one row over their floor."""

OVER_PLAIN = 8.0
"""Least time of plain ``tl.dot`` over that with tensor cores: 16 requests, e4m3, 4 rows, 6/1 heads."""

OF_STREAM = 0.7
"""Least share of the bandwidth of streams that :data:`OF_STREAM_KERNELS` reach at 64 requests, 4 rows."""

OF_STREAM_KERNELS = ("prepare", "select", "verify", "gdn")

_SMALL, _WIDE = (6, 1), (24, 2)


@dataclass(frozen=True)
class Verdict:
    """A goal and what was predicted.

    Attributes:
        cell: the step in words.
        what: is compared.
        bar: the most or the least that it may be.
        predicted: what it is.
        at_least: whether the bar is the least.
    """

    cell: str
    what: str
    bar: float
    predicted: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the goal is reached, if the prediction holds."""
        return self.predicted >= self.bar if self.at_least else self.predicted <= self.bar

    def cells(self) -> tuple[str, ...]:
        """A row for people: step, what, bar, prediction and verdict."""
        bar = f"{'>=' if self.at_least else '<='} {self.bar:g}"
        return self.cell, self.what, bar, f"{self.predicted:.3g}", "met" if self.met else "MISSED"

    def to_json(self) -> dict[str, Any]:
        """A record of `summary.json`."""
        return {**vars(self), "met": self.met}


def judge(rows: Sequence[Row], config: PredictConfig) -> list[Verdict]:
    """Every goal for which the rows hold what it compares; none where steps are not those of the goals."""
    usual = PredictConfig()
    if any(getattr(config, name) != getattr(usual, name) for name in ("overlap", "head_dim", "topk")):
        return []
    times = {
        (*(row[name] for name in CELL_COLUMNS), row["implementation"]): row["predicted_us"]
        for row in rows
        if row["predicted_us"] is not None
    }
    verdicts: list[Verdict] = []
    for row in rows:
        if row["implementation"] == "gluon" and row["predicted_us"] is not None:
            verdicts += _of_row(row, times)
    return verdicts


def judge_step_kernels(rows: Sequence[Row]) -> list[Verdict]:
    """The goals of the other calls of a step."""
    return [
        Verdict(
            f"{row['kernel']}, {cell_label(row)}", "share of 830 GB/s", OF_STREAM, row["floor_fraction"], True
        )
        for row in rows
        if row["kernel"] in OF_STREAM_KERNELS
        and (row["requests"], row["rows"]) == (64, 4)
        and row["predicted_us"] is not None
    ]


def _of_row(row: Row, times: dict[tuple[Any, ...], float]) -> Iterator[Verdict]:
    us, label = row["predicted_us"], cell_label(row)
    heads = row["query_heads"], row["kv_heads"]

    def other(**changed: Any) -> float | None:
        return times.get(tuple((row | changed)[name] for name in (*CELL_COLUMNS, "implementation")))

    fp16 = other(kv_format="fp16")
    if row["kv_format"] != "fp16" and fp16 is not None:
        yield Verdict(label, "time over that of fp16", 1.0, us / fp16)
    if row["kv_format"] != "e4m3":
        return
    if row["rows"] == 4 and heads == _SMALL:
        if row["requests"] in TIMES_US:
            yield Verdict(label, "microseconds", TIMES_US[row["requests"]], us)
        plain = other(implementation="triton")
        if row["requests"] == 16 and plain is not None:
            yield Verdict(label, "time of plain tl.dot over it", OVER_PLAIN, plain / us, at_least=True)
    small = other(query_heads=_SMALL[0], kv_heads=_SMALL[1])
    if heads == _WIDE and row["rows"] == 4 and small is not None:
        yield Verdict(label, "time over that of 6/1 heads", WIDE_HEADS, us / small)
    if row["rows"] == 1 and row["requests"] == 64:
        yield Verdict(label, "time over its floor", DECODE_OVER_FLOOR, us / row["floor_us"])
