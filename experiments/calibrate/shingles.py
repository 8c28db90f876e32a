"""Whether texts share runs of words: what a model is calibrated on must not be what it is evaluated on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from page4.kernels.errors import InputError


@dataclass(frozen=True)
class Overlap:
    """Outcome of a check.

    Attributes:
        words: Length of a shingle.
        shingles: Distinct shingles of the corpus.
        evaluation_shingles: Distinct shingles of the evaluation texts.
    """

    words: int
    shingles: int
    evaluation_shingles: int


def check_overlap(corpus: Mapping[str, str], evaluation: Mapping[str, str], words: int = 13) -> Overlap:
    """Refuse a corpus that shares a shingle, `words` words in a row, with an evaluation text.

    Words are compared in lower case and without what stands between them, so line breaks, punctuation and
    markup hide nothing.

    Args:
        corpus, evaluation: Texts by name.
        words: Length of a shingle. A text shorter than that is one shingle.

    Raises:
        InputError: They share one; the first is named.
    """
    where: dict[int, str] = {}
    for name, text in evaluation.items():
        for shingle in _shingles(text, words):
            where.setdefault(hash(shingle), name)
    seen: set[int] = set()
    shared: dict[int, tuple[str, str, str]] = {}
    for name, text in corpus.items():
        for shingle in _shingles(text, words):
            key = hash(shingle)
            seen.add(key)
            if key in where and key not in shared:
                shared[key] = (name, where[key], " ".join(shingle))
    if shared:
        name, other, first = next(iter(shared.values()))
        raise InputError(
            f"the calibration text {name!r} shares {words} words in a row with the evaluation text "
            f"{other!r}: {first!r} ({len(shared)} such runs in all); calibrate from other text"
        )
    return Overlap(words, len(seen), len(where))


def _shingles(text: str, words: int) -> Iterator[tuple[str, ...]]:
    found = re.findall(r"\w+", text.lower())
    if found:
        for start in range(max(len(found) - words, 0) + 1):
            yield tuple(found[start : start + words])
