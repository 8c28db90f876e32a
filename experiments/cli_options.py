"""Options that the commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file with settings, by name.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one setting; may be repeated. Wins over --config."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="auto|cpu|cuda", help="Where to run; auto takes a GPU when there is one."
    ),
]
Model = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="Checkpoint; the shipped one by default."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of everything random.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder of the results; one that this study began is resumed."),
]
Quick = Annotated[bool, typer.Option("--quick", help="A small run, to see that everything works.")]
Json = Annotated[bool, typer.Option("--json", help="End standard output with one JSON object on one line.")]
Scales = Annotated[
    str | None,
    typer.Option(
        "--scales",
        metavar="shipped|DIR",
        help="Static KV scales from an overlay, or from a folder with one per format; calibrated here by "
        "default.",
    ),
]
AllowUnit = Annotated[
    bool,
    typer.Option(
        "--allow-unit-target-scales", help="Where the overlay has no target scales, decode with 1.0 for all."
    ),
]
