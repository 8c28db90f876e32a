"""The goals of the kernels on an H200, and what a bench says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from page4.experiments.bench.cells import (
    GOAL_CONTEXT,
    GOAL_FORMATS,
    GOAL_OVERLAP,
    GOAL_SHAPES,
    PREFILL_HEADS,
    SHAPE_COLUMNS,
    shape_label,
)
from page4.experiments.samples import Row

Quantity = Literal["time", "bandwidth", "speedup", "fp16"]

_UNITS = {"time": "us", "bandwidth": "of copy bandwidth", "speedup": "x pytorch", "fp16": "x the fp16 time"}


@dataclass(frozen=True)
class Goal:
    """A bar for rows of one kernel whose columns have the given values.

    Attributes:
        kernel: of the rows.
        columns: values of shape columns.
        quantity: ``time`` (microseconds, at most), ``bandwidth`` (share of the measured copy bandwidth, at
            least), ``speedup`` (the baseline's time over this one, at least) or ``fp16`` (this time over that
            of the same cell in fp16, at most).
        value: the bar.
    """

    kernel: str
    columns: Mapping[str, Any]
    quantity: Quantity
    value: float

    @property
    def at_least(self) -> bool:
        """Whether more is better."""
        return self.quantity in ("bandwidth", "speedup")

    def applies(self, row: Row) -> bool:
        """Whether the row is one of those."""
        return row["kernel"] == self.kernel and all(
            row[name] == value for name, value in self.columns.items()
        )


def _step_goals() -> list[Goal]:
    goals = []
    bars = (6.0, 7.0, 10.0, 22.0, 30.0, 58.0)
    for (requests, rows, query_heads, kv_heads), microseconds in zip(GOAL_SHAPES, bars, strict=True):
        columns = {
            "requests": requests, "rows": rows, "query_heads": query_heads, "kv_heads": kv_heads,
            "context": GOAL_CONTEXT, "overlap": GOAL_OVERLAP, "kv_format": GOAL_FORMATS[0],
        }  # fmt: skip
        goals.append(Goal("planned_attention", columns, "time", microseconds))
    return goals


def _prefill_goals() -> list[Goal]:
    heads = {"query_heads": PREFILL_HEADS[0], "kv_heads": PREFILL_HEADS[1]}
    return [Goal("prefill", heads | {"rows": length}, "speedup", 3.0) for length in (8192, 32768)]


GOALS = (
    *_step_goals(),
    Goal("qsa_prepare", {"requests": 1, "rows": 8192}, "bandwidth", 0.7),
    Goal("index_scores", {"requests": 64, "context": 262144}, "bandwidth", 0.7),
    Goal("gated_delta", {"requests": 64, "rows": 4}, "bandwidth", 0.7),
    Goal("mtp_verify", {"requests": 64, "rows": 4}, "bandwidth", 0.7),
    Goal("mtp_verify_sampled", {"requests": 64, "rows": 4}, "bandwidth", 0.7),
    Goal("block_select", {"requests": 1, "rows": 4, "context": 32768, "overlap": 0.9}, "time", 10.0),
    Goal("block_select", {"requests": 1, "rows": 4, "context": 262144, "overlap": 0.9}, "time", 25.0),
    *_prefill_goals(),
    *(
        Goal(kernel, {"kv_format": "e4m3"}, "fp16", 1.0)
        for kernel in ("page4_attention", "planned_attention", "prefill")
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What a row says of a goal.

    Attributes:
        row: the row judged.
        goal: the goal.
        measured: in the goal's unit; None where the row, or the one it is compared with, has no time.
    """

    row: Row
    goal: Goal
    measured: float | None

    @property
    def met(self) -> bool | None:
        """Whether the bar is reached; None where nothing was measured."""
        if self.measured is None:
            return None
        if self.goal.at_least:
            return self.measured >= self.goal.value
        return self.measured <= self.goal.value

    @property
    def excess(self) -> float | None:
        """How far the row is on the wrong side of the bar, relative to it; negative on the right side."""
        if self.measured is None:
            return None
        above = self.measured / self.goal.value - 1
        return -above if self.goal.at_least else above

    def text(self) -> str:
        """The bar, and met or missed by how much, for a table."""
        unit = _UNITS[self.goal.quantity]
        sign = ">=" if self.goal.at_least else "<="
        bar = f"{100 * self.goal.value:g} %" if self.goal.quantity == "bandwidth" else f"{self.goal.value:g}"
        head = f"{sign} {bar} {unit}"
        if self.measured is None or self.excess is None:
            return f"{head}: not measured"
        share = f"{100 * abs(self.excess):.0f} %"
        if self.goal.quantity == "time":
            share = f"{abs(self.measured - self.goal.value):.1f} us ({share})"
        elif self.goal.quantity != "bandwidth":
            share = f"{share} ({self.measured:.2f})"
        return f"{head}: {'met' if self.met else 'MISSED'} by {share}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as a record of `summary.json`."""
        return {
            "kernel": self.row["kernel"],
            "shape": shape_label(self.row),
            "implementation": self.row["implementation"],
            "quantity": self.goal.quantity,
            "goal": self.goal.value,
            "measured": self.measured,
            "met": self.met,
        }


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Every goal that applies to a row of the implementation that the model gets."""
    times = {
        (*_cell(row), row["implementation"]): row["median_us"] for row in rows if row["median_us"] is not None
    }
    verdicts = []
    for row in rows:
        if row["chosen"]:
            verdicts += [Verdict(row, g, _measured(row, g.quantity, times)) for g in GOALS if g.applies(row)]
    # A cell without an fp16 partner in the bench says nothing about fp16.
    return [v for v in verdicts if v.goal.quantity != "fp16" or v.measured is not None]


def _cell(row: Row, **changed: Any) -> tuple[Any, ...]:
    return (row["kernel"], *(changed.get(name, row[name]) for name in SHAPE_COLUMNS))


def _measured(row: Row, quantity: Quantity, times: Mapping[tuple[Any, ...], float]) -> float | None:
    mine: float | None = row["median_us"]
    if mine is None or quantity == "time":
        return mine
    if quantity == "bandwidth":
        fraction: float = row["floor_fraction"]
        return fraction
    if quantity == "speedup":
        other = times.get((*_cell(row), "pytorch"))
        return None if other is None else other / mine
    other = times.get((*_cell(row, kv_format="fp16"), row["implementation"]))
    return None if other is None else mine / other
