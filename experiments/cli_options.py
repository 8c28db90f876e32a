"""Options that the commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    """Choices of `--device`."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file with the study's settings.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one setting; may be repeated. Wins over --config."
    ),
]
DeviceOption = Annotated[
    Device | None, typer.Option("--device", help="Where to run; auto takes a GPU when there is one.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of everything random.")]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of the results; one that exists is resumed.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A small run that shows everything works.")]
Json = Annotated[bool, typer.Option("--json", help="End standard output with one JSON object on one line.")]
