"""Packed tokens come back as they were, and damage is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from page4.experiments.corpus.build import Corpus, SourceReport
from page4.experiments.corpus.pack import load, save, tokenise
from page4.experiments.corpus.tokenizer import train_tokenizer
from page4.kernels.errors import InputError

DOCUMENTS = [("s/a", "one two three\n"), ("s/b", "naïve café – two\n")]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    report = SourceReport("s", "p", "MIT", "prose", "f", "")
    corpus = Corpus({"s": DOCUMENTS}, {"s/h": "held out\n"}, {"s/v": "validated\n"}, [report])
    tokenizer = train_tokenizer(iter([text for _, text in DOCUMENTS]), vocab_size=300)
    save(tokenise(corpus, tokenizer), tmp_path, workers=1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_documents_come_back_exactly_and_end_with_id_0(packed: Path) -> None:
    from tokenizers import Tokenizer

    data = load(packed, workers=1)
    tokenizer = Tokenizer.from_file(str(packed / "tokenizer.json"))
    ends = np.flatnonzero(data.train == 0)
    assert len(ends) == 2 and ends[-1] == len(data.train) - 1
    first, second = data.train[: ends[0]], data.train[ends[0] + 1 : ends[1]]
    assert [tokenizer.decode(part.tolist()) for part in (first, second)] == [text for _, text in DOCUMENTS]
    assert tokenizer.decode(data.held_out["s/h"].tolist()) == "held out\n"
    assert tokenizer.decode(data.validation["s/v"].tolist()) == "validated\n"


def test_packing_again_removes_what_a_killed_process_was_writing(packed: Path) -> None:
    names = {file.name for file in packed.iterdir()}
    rest = {"held_out.xz", "validation.xz", "meta.json", "tokenizer.json"}
    assert names == rest | {f"train.{i}.xz" for i in range(8)}
    (packed / ".train.0.partial-0123abcd.xz").write_bytes(b"half")
    save(load(packed, workers=1), packed, workers=1)
    assert {file.name for file in packed.iterdir()} == names


def test_tokens_of_another_build_are_refused(packed: Path) -> None:
    meta = json.loads((packed / "meta.json").read_text())
    (packed / "meta.json").write_text(json.dumps({**meta, "train_sha256": "0" * 64}))
    with pytest.raises(InputError, match="SHA-256"):
        load(packed, workers=1)


def test_a_missing_corpus_is_told_how_to_get(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no packed corpus: build one with page4 corpus"):
        load(tmp_path)


def test_a_damaged_part_is_refused(packed: Path) -> None:
    (packed / "held_out.xz").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"held_out\.xz"):
        load(packed, workers=1)
