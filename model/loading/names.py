"""Names of tensors: which belong to the text model, and how many of them are said in one line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

# Tensors of the vision tower beside a text model are none of its weights.
_VISION = ("model.visual.", "visual.")
_TEXT = "model.language_model."
_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")
_MOST_LISTED = 40
_LONGEST = 300  # characters


def text_name(stored: str) -> str | None:
    """The name in the text-only layout of a tensor of either class, or None for one of the vision tower.

    The multimodal class keeps its text model under ``model.language_model.``; head and MTP stand outside.
    """
    if stored.startswith(_VISION):
        return None
    return "model." + stored.removeprefix(_TEXT) if stored.startswith(_TEXT) else stored


def listed(names: Iterable[str]) -> str:
    """All of the names in one line: those that differ by a number only are one, ``layers.{0-2,5}.mlp``."""
    # Parts at odd places are numbers, or the ranges that stand for several.
    entries = {tuple(_NUMBER.split(name)) for name in names}
    for place in range(max((len(entry) for entry in entries), default=0) - 2, 0, -2):
        alike: dict[tuple[str, str], tuple[tuple[str, ...], list[str]]] = {}
        for entry in entries:
            if place < len(entry):
                rest = entry[:place], entry[place + 1 :]
                alike.setdefault((repr(rest[0]), repr(rest[1])), (entry, []))[1].append(entry[place])
        merged = {entry for entry in entries if place >= len(entry)}
        for entry, numbers in alike.values():
            merged.add((*entry[:place], _ranges(numbers), *entry[place + 1 :]))
        entries = merged
    lines = sorted("".join(entry) for entry in entries)
    more = [f"{len(lines) - _MOST_LISTED} more"] if len(lines) > _MOST_LISTED else []
    return ", ".join([one_line(line) for line in lines[:_MOST_LISTED]] + more)


def one_line(text: object) -> str:
    """A text from a file that may be damaged, or an error that quotes one: printable, and not long."""
    line = " ".join(str(text).split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _ranges(numbers: list[str]) -> str:
    """``7``, or ``{0-2,5}`` for several."""
    if len(numbers) == 1:
        return numbers[0]
    runs: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(sorted(int(n) for n in numbers)):
        runs[number - place].append(number)
    return "{" + ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs.values()) + "}"
