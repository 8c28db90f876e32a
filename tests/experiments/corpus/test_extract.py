"""Extractors read their package formats."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

from page4.experiments.corpus.extract import extract
from page4.experiments.corpus.sources import SOURCES, Source


def _source(format_: str, root: str = "", skip: str = "") -> Source:
    return Source("s", "wheel", "p", "MIT", format_, root, "docs", skip)  # type: ignore[arg-type]


def _r_object(lines: list[str]) -> bytes:
    body = b"X\n" + struct.pack(">iii", 2, 0x040000, 0x020300) + struct.pack(">ii", 16, len(lines))
    for line in lines:
        data = line.encode()
        body += struct.pack(">ii", 0x00040009, len(data)) + data
    return body


def test_r_strings_finds_the_novel_among_other_objects(tmp_path: Path) -> None:
    novel = ["", "PERSUASION", ""] + [f"Line {i} of the novel goes on and on." for i in range(2000)]
    records = [_r_object(["x"]), _r_object(novel)]
    blob = b"".join(struct.pack(">I", len(r)) + zlib.compress(r) for r in records)
    (tmp_path / "Rdata.rdb").write_bytes(blob)
    [(name, text)] = extract(tmp_path, _source("r_strings"))
    assert name == "persuasion"
    assert text.split("\n") == novel


def test_sword_reads_blocks_and_drops_markup(tmp_path: Path) -> None:
    parts = [
        zlib.compress(b"<verse id='1'>In the beginning<note>n</note></verse>"),
        zlib.compress(b"God &amp; all"),
    ]
    (tmp_path / "ot.bzz").write_bytes(b"".join(parts))
    rows = struct.pack("<III", 0, len(parts[0]), 0) + struct.pack("<III", len(parts[0]), len(parts[1]), 0)
    (tmp_path / "ot.bzs").write_bytes(rows)
    [(name, text)] = extract(tmp_path, _source("sword"))
    assert name == "ot"
    assert text.split("\n") == ["", "In the beginning", "", "God & all"]


def test_factbook_puts_one_field_on_a_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    value = {"Geography": {"Area": {"text": "5 sq km"}, "Notes": [{"text": "<b>flat</b>"}]}}
    (tmp_path / "data" / "xx.json").write_text(json.dumps(value))
    [(name, text)] = extract(tmp_path, _source("factbook"))
    assert name == "xx"
    assert text.split("\n") == ["", "Geography", "Area: 5 sq km", "Notes: flat"]


def test_python_files_come_in_order_without_skipped_ones(tmp_path: Path) -> None:
    for file in ("b.py", "a.py", "tests/test_a.py"):
        (tmp_path / "pkg" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pkg" / file).write_text(file)
    found = list(extract(tmp_path, _source("python", "pkg", r"(^|/)tests/")))
    assert [name for name, _ in found] == ["a.py", "b.py"]


def test_rst_pages_are_named_by_their_place_below_sources(tmp_path: Path) -> None:
    page = tmp_path / "html" / "_sources" / "library" / "os.rst.txt"
    page.parent.mkdir(parents=True)
    page.write_text("os\n==")
    assert list(extract(tmp_path, _source("rst"))) == [("library/os", "os\n==")]


def test_no_source_carries_a_copyleft_licence() -> None:
    allowed = {"public domain", "PSF-2.0", "PostgreSQL", "BSD-3-Clause", "MIT"}
    assert {source.licence for source in SOURCES} <= allowed
