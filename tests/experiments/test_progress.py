"""Progress off a terminal is a line now and then, and always the last one."""

from __future__ import annotations

import io

import pytest

from page4.experiments.progress import Silent, progress_on


def test_a_log_gets_the_start_and_the_end_but_not_every_step() -> None:
    stream = io.StringIO()
    with progress_on(stream, "acceptance") as progress:
        progress.start(total=100, done=10)
        for _ in range(90):
            progress.advance("fp16")
    first, last = stream.getvalue().splitlines()
    assert first.startswith("acceptance: 10/100 after")
    assert last.startswith("acceptance: 100/100 after")
    assert last.endswith("fp16")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_passing_progress_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    pipe, terminal = io.StringIO(), _Terminal()
    for stream in (pipe, terminal):
        with progress_on(stream, "loading", passing=True) as progress:
            progress.advance("the checkpoint", 0)
            progress.start(total=2)
            progress.advance("the prompt", 2)
    assert pipe.getvalue() == ""
    shown = terminal.getvalue()
    assert "loading" in shown and "the prompt" in shown and "2/2" in shown
    assert shown.endswith("\x1b[2K"), "its line is empty again"


def test_silence_takes_every_report() -> None:
    silent = Silent()
    silent.start(3)
    silent.advance("step", 2)
