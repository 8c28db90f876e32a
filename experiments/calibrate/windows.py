"""The windows of text that a calibration runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from page4.experiments.calibrate.config import CalibrateConfig
from page4.experiments.prompt_windows import Text


@dataclass(frozen=True)
class Window:
    """A part of a text: its tokens from `start` on."""

    text: str
    start: int
    tokens: list[int]


def cut_windows(config: CalibrateConfig, texts: Sequence[Text]) -> list[Window]:
    """The windows of all shards: texts cut one after the other, taken from the texts in turn."""
    cut = [
        [
            Window(text.name, start, text.tokens[start : start + config.window])
            for start in _starts(config, text)
        ]
        for text in texts
    ]
    longest = max(map(len, cut), default=0)
    in_turn = [windows[turn] for turn in range(longest) for windows in cut if turn < len(windows)]
    return in_turn[: config.max_windows or None]


def own_windows(config: CalibrateConfig, windows: Sequence[Window]) -> list[Window]:
    """Those of this run's shard."""
    return list(windows[config.shard :: config.shards])


def digest(windows: Sequence[Window]) -> str:
    """SHA-256 of the windows' tokens and places."""
    sha256 = hashlib.sha256()
    for window in windows:
        sha256.update(repr((window.text, window.start, window.tokens)).encode())
    return sha256.hexdigest()


def _starts(config: CalibrateConfig, text: Text) -> range:
    return range(0, len(text.tokens), config.window)
