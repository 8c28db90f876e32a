"""Progress of long work, shown on standard error so that standard output holds results alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Reporter(Protocol):
    """What a study reports its progress to."""

    def start(self, total: int, done: int = 0) -> None:
        """Announce the number of steps, and how many of them an earlier run has done."""

    def advance(self, description: str = "", steps: int = 1) -> None:
        """Report finished steps; the description says what comes next or what the last one gave."""


class Silent:
    """Reports nothing: the default of calls from Python."""

    def start(self, total: int, done: int = 0) -> None:
        """Ignore the announcement."""

    def advance(self, description: str = "", steps: int = 1) -> None:
        """Ignore the step."""


class _Bar:
    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None)

    def start(self, total: int, done: int = 0) -> None:
        self._progress.update(self._task, total=total, completed=done)

    def advance(self, description: str = "", steps: int = 1) -> None:
        self._progress.update(self._task, advance=steps, description=description or None)


class _Lines:
    """Plain lines for logs, at most one in `interval` seconds and one at the end."""

    def __init__(self, stream: TextIO, title: str, interval: float = 15.0) -> None:
        self._stream, self._title, self._interval = stream, title, interval
        self._total = self._done = 0
        self._started = self._last = time.monotonic()

    def start(self, total: int, done: int = 0) -> None:
        self._total, self._done = total, done
        self._print("")

    def advance(self, description: str = "", steps: int = 1) -> None:
        self._done += steps
        if time.monotonic() - self._last >= self._interval or self._done >= self._total:
            self._print(description)

    def _print(self, description: str) -> None:
        self._last = time.monotonic()
        elapsed = self._last - self._started
        print(
            f"{self._title}: {self._done}/{self._total} after {elapsed:.0f} s {description}".rstrip(),
            file=self._stream,
            flush=True,
        )


@contextlib.contextmanager
def progress_on(stream: TextIO, title: str, passing: bool = False) -> Iterator[Reporter]:
    """A bar with the time left where `stream` is a terminal, and occasional lines elsewhere.

    Args:
        stream: Where to.
        title: What the work is called before it says more.
        passing: Leave no trace: the bar vanishes at the end, and nothing is written elsewhere.
    """
    if not stream.isatty():
        yield Silent() if passing else _Lines(stream, title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream), transient=passing) as progress:
        yield _Bar(progress, title)
