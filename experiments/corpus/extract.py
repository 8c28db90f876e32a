"""One extractor per source format: an unpacked package in, ``(name, text)`` pairs in natural order out."""

from __future__ import annotations

import html
import json
import re
import struct
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from page4.experiments.corpus.sources import Source
from page4.experiments.corpus.text import read, strip_html
from page4.kernels.errors import InputError

Documents = Iterator[tuple[str, str]]


def _files(package: Path, source: Source, *patterns: str) -> list[Path]:
    root = package / source.root
    skip = re.compile(source.skip) if source.skip else None
    found = {path for pattern in patterns for path in root.rglob(pattern) if path.is_file()}
    if skip is not None:
        found = {path for path in found if not skip.search(path.relative_to(root).as_posix())}
    return sorted(found)


def _name(path: Path, root: Path) -> str:
    name = path.relative_to(root).as_posix()
    return re.sub(r"(\.rst|\.txt|\.html|\.gz|\.inc)+$", "", name)


def wheel_text(package: Path, source: Source) -> Documents:
    """Plain ``.txt`` files below a folder called ``source.root`` anywhere in a wheel."""
    for path in sorted(package.rglob("*.txt")):
        if source.root in path.parts:
            yield path.stem, read(path)


def plain_file(package: Path, source: Source) -> Documents:
    """The one file called ``source.root``."""
    for path in package.rglob(source.root):
        yield "newton_opticks" if source.name == "opticks" else path.stem, read(path)


def html_pages(package: Path, source: Source) -> Documents:
    """Every HTML page."""
    for path in _files(package, source, "*.html"):
        yield _name(path, package / source.root), strip_html(read(path))


def rst_pages(package: Path, source: Source) -> Documents:
    """The reStructuredText sources that Sphinx leaves beside its pages."""
    for path in _files(package, source, "*.rst.txt", "*.rst", "*.txt", "*.txt.gz", "*.rst.txt.gz"):
        name = _name(path, package / source.root)
        if path.name.lower().startswith(("copyright", "readme", "license", "searchindex")):
            continue
        yield name.rpartition("_sources/")[2] or name, read(path)


def python_files(package: Path, source: Source) -> Documents:
    """Python source files."""
    for path in _files(package, source, "*.py"):
        yield path.relative_to(package / source.root).as_posix(), read(path)


def r_strings(package: Path, source: Source) -> Documents:
    """Character vectors of an R lazy-load database: novels, one string per line.

    An ``.rdb`` file is a run of (4-byte length, zlib stream) records, each an object in R's serialisation.
    """
    for database in sorted(package.rglob("Rdata.rdb")):
        data = database.read_bytes()
        position = 0
        while position < len(data):
            stream = zlib.decompressobj()
            try:
                lines = _r_character_vector(stream.decompress(data[position + 4 :]))
            except zlib.error as error:
                raise InputError(f"{database}: record at byte {position} is not a zlib stream") from error
            position = len(data) - len(stream.unused_data)
            text = "\n".join(lines)
            if len(text) > 50_000:
                title = next(line for line in lines if line.strip())
                yield re.sub(r"\W+", "_", title[:40]).strip("_").lower(), text


def _r_character_vector(data: bytes) -> list[str]:
    """The strings of a serialised ``STRSXP``; empty for any other R object."""
    char_type, vector_type = 9, 16
    if data[:2] != b"X\n":
        return []
    version = struct.unpack_from(">i", data, 2)[0]
    at = 14
    if version == 3:
        at += 4 + struct.unpack_from(">i", data, at)[0]
    flags, count = struct.unpack_from(">ii", data, at)
    if flags & 0xFF != vector_type:
        return []
    at += 8
    lines = []
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", data, at)
        if flags & 0xFF != char_type:
            return []
        at += 8
        size = max(length, 0)  # -1 is NA
        lines.append(data[at : at + size].decode("utf-8", "replace"))
        at += size
    return lines


def sword(package: Path, source: Source) -> Documents:
    """SWORD ``zText``/``zCom`` modules: blocks of zlib text, indexed by (offset, size, unpacked size)."""
    for blocks in sorted([*package.rglob("*.bzz"), *package.rglob("*.czz")]):
        index = blocks.with_suffix(blocks.suffix[:-1] + "s").read_bytes()
        data = blocks.read_bytes()
        parts = []
        for offset, size, _ in struct.iter_unpack("<III", index):
            try:
                parts.append(zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace"))
            except zlib.error:
                continue  # indexes hold a few empty rows
        text = "\n".join(parts)
        text = re.sub(r"(?s)<(note|title)\b.*?</\1>", "", text)
        text = re.sub(r"<(/?)(p|div|lb|l|br|verse)\b[^>]*>", "\n", text)
        yield blocks.stem, html.unescape(re.sub(r"<[^>]+>", "", text))


def factbook(package: Path, _source: Source) -> Documents:
    """Country profiles: nested JSON, one ``field: text`` line per leaf."""

    def walk(value: Any, key: str = "") -> str:
        if isinstance(value, dict):
            if set(value) == {"text"}:
                return f"{key}: {value['text']}"
            return key + "\n" + "\n".join(walk(child, name) for name, child in value.items())
        if isinstance(value, list):
            return "\n".join(walk(child, key) for child in value)
        return f"{key}: {value}"

    for path in sorted(package.rglob("*.json")):
        if "data" in path.parts:
            yield path.stem, re.sub(r"<[^>]+>", "", html.unescape(walk(json.loads(read(path)))))


EXTRACTORS: dict[str, Callable[[Path, Source], Documents]] = {
    "wheel_text": wheel_text,
    "plain_file": plain_file,
    "html": html_pages,
    "rst": rst_pages,
    "python": python_files,
    "r_strings": r_strings,
    "sword": sword,
    "factbook": factbook,
}


def extract(package: Path, source: Source) -> Documents:
    """Documents of one source; ``package`` is ignored for the interpreter's own library."""
    if source.kind == "interpreter":
        package = Path(sysconfig.get_path("stdlib"))
    return EXTRACTORS[source.format](package, source)
