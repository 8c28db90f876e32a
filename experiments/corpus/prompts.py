"""Writes the held-out texts as the prompt files of the studies."""

from __future__ import annotations

import hashlib
from pathlib import Path

from page4.experiments.atomic import remove_leftovers, write_bytes, write_json
from page4.experiments.corpus.build import Corpus
from page4.experiments.corpus.sources import HELD_OUT, SOURCES


def write_prompts(corpus: Corpus, folder: Path) -> list[dict[str, str]]:
    """One ``<name>.txt`` per held-out text, exactly what was kept out of training, and ``prompts.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    by_name = {source.name: source for source in SOURCES}
    entries = []
    for text in HELD_OUT:
        source = by_name[text.document.split("/")[0]]
        name = text.document.split("/")[1]
        data = corpus.held_out[text.document].encode()
        write_bytes(folder / f"{name}.txt", data)
        entries.append(
            {
                "name": name,
                "file": f"{name}.txt",
                "title": text.title,
                "kind": text.kind,
                "source": source.package,
                "licence": source.licence,
                "document": text.document,
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        )
    write_json(folder / "prompts.json", entries)
    return entries
