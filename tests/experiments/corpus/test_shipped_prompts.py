"""The shipped prompts are the held-out texts, byte for byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import page4.experiments as experiments
from page4.experiments.corpus.sources import HELD_OUT

FOLDER = Path(experiments.__path__[0]) / "prompts"


def test_prompts_match_their_digests_and_the_held_out_list() -> None:
    entries = json.loads((FOLDER / "prompts.json").read_text())
    assert [entry["document"] for entry in entries] == [text.document for text in HELD_OUT]
    for entry in entries:
        data = (FOLDER / entry["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], entry["name"]
