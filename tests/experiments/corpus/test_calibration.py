"""The excerpts that the shipped scales are calibrated from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from page4.experiments.calibrate.config import TEXTS
from page4.experiments.corpus.build import Corpus
from page4.experiments.corpus.calibration import CHARACTERS, EXCERPTS, cut, write_calibration
from page4.experiments.corpus.sources import HELD_OUT, VALIDATION
from page4.experiments.prompt_windows import read_texts
from page4.kernels.errors import InputError


def test_an_excerpt_is_whole_lines() -> None:
    text = "".join(f"line {number} of the text\n" for number in range(2000))
    part = cut(text, 100)
    assert part in text and part.startswith("line ") and part.endswith("text\n")
    assert CHARACTERS <= len(part) < CHARACTERS + 30 and text.index(part) >= 100
    assert cut("a\nb\nc", 1) == "b\nc"


def test_the_shipped_texts_are_the_excerpts() -> None:
    entries = json.loads((TEXTS / "prompts.json").read_text())
    assert [(e["document"], e["after"]) for e in entries] == [(x.document, str(x.after)) for x in EXCERPTS]
    assert len(read_texts(TEXTS)) == len(EXCERPTS)  # each with its SHA-256
    kept_out = {text.document for text in HELD_OUT} | set(VALIDATION)
    assert not kept_out & {excerpt.document for excerpt in EXCERPTS}


def test_excerpts_are_cut_from_the_training_text(tmp_path: Path) -> None:
    corpus = Corpus()
    for excerpt in EXCERPTS:
        lines = "".join(f"{excerpt.title} {number}\n" for number in range(20_000))
        corpus.train.setdefault(excerpt.document.split("/")[0], []).append((excerpt.document, lines))
    entries = write_calibration(corpus, tmp_path)
    for entry, (name, _, text) in zip(
        sorted(entries, key=lambda e: e["name"]), read_texts(tmp_path), strict=True
    ):
        assert entry["name"] == name and text.startswith(entry["title"])
        assert entry["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    corpus.train["austen"].clear()
    with pytest.raises(InputError, match="no document austen/emma to calibrate from"):
        write_calibration(corpus, tmp_path)
