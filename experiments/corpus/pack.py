"""Token files that travel well: uint16 ids, LZMA, in parts that pack and unpack in parallel."""

from __future__ import annotations

import hashlib
import json
import lzma
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from page4.experiments.atomic import remove_leftovers, write_bytes, write_json
from page4.experiments.corpus.build import Corpus
from page4.kernels.errors import InputError

Tokens = NDArray[np.uint16]
PARTS = 8


@dataclass(frozen=True)
class SourceSpan:
    """Where a source's tokens lie in the training stream."""

    name: str
    genre: str
    start: int
    end: int


@dataclass(frozen=True)
class PackedData:
    """Training stream (documents of one source adjacent, id 0 after each), and the texts kept out of it."""

    train: Tokens
    spans: tuple[SourceSpan, ...]
    held_out: dict[str, Tokens]
    validation: dict[str, Tokens]


def _encode(tokenizer: Tokenizer, texts: list[str], end: bool) -> list[Tokens]:
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array([*item.ids, 0] if end else item.ids, dtype=np.uint16) for item in encoded]


def tokenise(corpus: Corpus, tokenizer: Tokenizer) -> PackedData:
    """Encodes every split."""
    genre = {report.name: report.genre for report in corpus.reports}
    pieces: list[Tokens] = []
    spans: list[SourceSpan] = []
    at = 0
    for source, documents in corpus.train.items():
        start = at
        for batch in range(0, len(documents), 64):
            texts = [text for _, text in documents[batch : batch + 64]]
            for tokens in _encode(tokenizer, texts, end=True):
                pieces.append(tokens)
                at += len(tokens)
        if at > start:
            spans.append(SourceSpan(source, genre[source], start, at))
    kept = [
        {name: _encode(tokenizer, [texts[name]], end=False)[0] for name in sorted(texts)}
        for texts in (corpus.held_out, corpus.validation)
    ]
    train = np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)
    return PackedData(train, tuple(spans), kept[0], kept[1])


def _compress(part: Tokens) -> bytes:
    # lc/lp/pb for 16-bit symbols; one dictionary spans a whole part.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1, "dict_size": 1 << 24}]
    return lzma.compress(part.astype("<u2").tobytes(), format=lzma.FORMAT_XZ, filters=filters)


def _decompress(path: Path) -> Tokens:
    try:
        return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")
    except (OSError, lzma.LZMAError) as error:
        raise InputError(f"{path}: not a packed token file ({error})") from error


def save(data: PackedData, folder: Path, workers: int = 2) -> None:
    """Writes ``train.N.xz``, ``held_out.xz``, ``validation.xz`` and ``meta.json`` (last)."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    parts = np.array_split(data.train, PARTS)
    with ProcessPoolExecutor(workers) as pool:
        for i, packed in enumerate(pool.map(_compress, parts)):
            write_bytes(folder / f"train.{i}.xz", packed)
    meta: dict[str, object] = {
        "train_tokens": len(data.train),
        "train_sha256": hashlib.sha256(data.train.astype("<u2").tobytes()).hexdigest(),
        "parts": PARTS,
        "spans": [[span.name, span.genre, span.start, span.end] for span in data.spans],
    }
    for split, texts in (("held_out", data.held_out), ("validation", data.validation)):
        empty = [np.zeros(0, np.uint16)]
        write_bytes(folder / f"{split}.xz", _compress(np.concatenate([*empty, *texts.values()])))
        meta[split] = [[name, len(tokens)] for name, tokens in texts.items()]
    write_json(folder / "meta.json", meta)


def load(folder: Path, workers: int = 8) -> PackedData:
    """Reads what :func:`save` wrote and checks the training stream's SHA-256.

    Raises:
        InputError: a file is missing, broken, or belongs to another build.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except FileNotFoundError as error:
        raise InputError(f"{folder} holds no packed corpus: build one with page4 corpus") from error
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{folder} holds no packed corpus: meta.json {error}") from error
    with ProcessPoolExecutor(workers) as pool:
        parts = list(pool.map(_decompress, [folder / f"train.{i}.xz" for i in range(meta["parts"])]))
    train = np.concatenate(parts)
    if hashlib.sha256(train.tobytes()).hexdigest() != meta["train_sha256"]:
        raise InputError(f"{folder}: the training tokens do not match the SHA-256 in meta.json")
    kept: list[dict[str, Tokens]] = []
    for split in ("held_out", "validation"):
        tokens, at = _decompress(folder / f"{split}.xz"), 0
        texts: dict[str, Tokens] = {}
        for name, length in meta[split]:
            texts[name] = tokens[at : at + length]
            at += length
        kept.append(texts)
    return PackedData(train, tuple(SourceSpan(*span) for span in meta["spans"]), kept[0], kept[1])
