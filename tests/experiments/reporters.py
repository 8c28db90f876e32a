"""Reporters of progress for the tests of studies."""

from __future__ import annotations


class Interrupter:
    """A reporter that interrupts the study after some cells, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self.left = after

    def start(self, total: int, done: int = 0) -> None:
        pass

    def advance(self, description: str = "", steps: int = 1) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Recorder:
    """A reporter that remembers what it was told: `done` counts all steps, `before` those of earlier runs."""

    def __init__(self) -> None:
        self.total = self.done = self.before = 0

    def start(self, total: int, done: int = 0) -> None:
        self.total, self.done, self.before = total, done, done

    def advance(self, description: str = "", steps: int = 1) -> None:
        self.done += steps
