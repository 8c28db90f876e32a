"""The held-out texts as prompt files: exactly as they were kept out, and listed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from page4.experiments.corpus.build import Corpus
from page4.experiments.corpus.prompts import write_prompts
from page4.experiments.corpus.sources import HELD_OUT


def test_every_text_is_a_file_of_its_bytes_and_listed_with_their_hash(tmp_path: Path) -> None:
    texts = {text.document: f"{text.title}: naïve,\r\nand so on\n" for text in HELD_OUT}
    (tmp_path / ".speech.partial-0123abcd.txt").write_text("what a killed process was writing")
    entries = write_prompts(Corpus(held_out=texts), tmp_path)
    assert [entry["document"] for entry in entries] == list(texts)
    assert json.loads((tmp_path / "prompts.json").read_text()) == entries
    for entry in entries:
        data = (tmp_path / entry["file"]).read_bytes()
        assert data == texts[entry["document"]].encode()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    assert {file.name for file in tmp_path.iterdir()} == {"prompts.json", *(e["file"] for e in entries)}
