"""Which of the tried configurations is recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["timed", "spills", "fails", "wrong"]
OUTCOMES: tuple[Outcome, ...] = ("timed", "spills", "fails", "wrong")

TIE = 0.03  # gaps that repeated measurements do not decide


@dataclass(frozen=True)
class Trial:
    """What became of a configuration.

    Attributes:
        config: of the kernel.
        outcome: `timed`; or skipped because it `spills` registers, `fails` to compile, or is `wrong`.
        median_us: time of a call in microseconds; None where it was skipped.
        note: why it was skipped.
    """

    config: Any
    outcome: Outcome
    median_us: float | None = None
    note: str = ""


def choose(trials: Sequence[Trial], default: Any) -> Trial | None:
    """The fastest trial; of those within 3 % of it the default, else the one that is easiest on the GPU.

    Easiest is: fewer splits, then fewer warps, then the smaller other fields in their order. So noise does
    not change the choice from run to run. None when nothing was timed.
    """
    timed = [(trial.median_us, trial) for trial in trials if trial.median_us is not None]
    if not timed:
        return None
    limit = min(time for time, _ in timed) * (1 + TIE)
    tied = [trial for time, trial in timed if time <= limit]
    return min(tied, key=lambda trial: (trial.config != default, *_effort(trial.config)))


def _effort(config: Any) -> tuple[int, ...]:
    fields = dataclasses.asdict(config)
    first = [fields.pop(name) for name in ("splits", "num_warps") if name in fields]
    return (*first, *fields.values())
