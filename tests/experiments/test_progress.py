"""Progress off a terminal is a line now and then, and always the last one."""

from __future__ import annotations

import io

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


def test_silence_takes_every_report() -> None:
    silent = Silent()
    silent.start(3)
    silent.advance("step", 2)
