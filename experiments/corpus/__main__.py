"""``python -m page4.experiments.corpus``: download, extract, train the tokenizer, pack, write the prompts."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from page4.experiments.corpus.build import build, table, write_manifest
from page4.experiments.corpus.pack import save, tokenise
from page4.experiments.corpus.prompts import write_prompts
from page4.experiments.corpus.tokenizer import train_tokenizer, training_texts
from page4.kernels.errors import InputError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m page4.experiments.corpus", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path(".cache/corpus"), help="downloads and unpacked packages"
    )
    parser.add_argument("--out", type=Path, default=Path(".cache/packed"), help="packed tokens and tokenizer")
    parser.add_argument(
        "--prompts", type=Path, default=Path("experiments/prompts"), help="held-out prompt files"
    )
    arguments = parser.parse_args()
    try:
        corpus = build(arguments.work)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(corpus), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_manifest(corpus, arguments.out / "sources.json")
    write_prompts(corpus, arguments.prompts)
    tokenizer = train_tokenizer(training_texts(corpus))
    partial = arguments.out / "tokenizer.json.partial"
    tokenizer.save(str(partial))
    os.replace(partial, arguments.out / "tokenizer.json")
    data = tokenise(corpus, tokenizer)
    print(f"{len(data.train):,} training tokens", flush=True)
    for span in data.spans:
        print(f"{span.name:18}{span.genre:10}{span.end - span.start:12,}")
    for split, texts in (("held out", data.held_out), ("validation", data.validation)):
        for name, tokens in texts.items():
            print(f"{split:11}{name:36}{len(tokens):9,}")
    save(data, arguments.out)
    print(
        f"packed: {sum(f.stat().st_size for f in arguments.out.glob('*.xz')) / 1e6:.1f} MB in {arguments.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
