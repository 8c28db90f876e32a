"""Text is normalised the same way whatever its source, and data is told from prose."""

from __future__ import annotations

from pathlib import Path

import pytest

import page4.experiments as experiments
from page4.experiments.corpus.text import keep_document, normalise, strip_html

PROSE = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune needs a wife. "
)


def test_normalise_fixes_line_ends_blanks_and_empty_lines() -> None:
    assert normalise("a \r\n\r\n\r\n\r\nb\xa0c\t\n\n") == "a\n\nb c\n"


def test_strip_html_keeps_the_words_and_breaks_paragraphs() -> None:
    page = (
        "<html><head><title>t</title></head><body><script>x()</script><p>One &amp; two</p><p>three</p></body>"
    )
    assert strip_html(page).split("\n") == ["One & two", "three", ""]


def test_prose_is_kept() -> None:
    novel = Path(experiments.__path__[0]) / "prompts" / "persuasion.txt"
    assert keep_document(novel.read_text(encoding="utf-8")[:5000])


@pytest.mark.parametrize(
    "text",
    ["short", "0.1234 5.6789 " * 100, "{}[]()<>;" * 100, "word " * 1000, PROSE * 400],
    ids=["short", "numbers", "symbols", "one word", "repeated"],
)
def test_data_and_repetition_are_dropped(text: str) -> None:
    assert not keep_document(text)
