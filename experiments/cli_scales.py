"""`page4 scales`: overlays of static KV scales."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from page4.experiments.cli_options import Json

if TYPE_CHECKING:  # these import PyTorch, which help does not wait for
    from page4.kvcache.overlay import Overlay, OverlayBase

app = typer.Typer(
    help="Overlays of static KV scales, in a folder beside the checkpoint.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The overlay.")]
Existing = Annotated[
    str,  # a path would not tell the word "shipped" from ./shipped
    typer.Argument(
        metavar="shipped|FOLDER", help="An overlay, or a folder with several, each under its format's name."
    ),
]
Model = Annotated[
    Path | None, typer.Option("--model", metavar="DIR", help="Its checkpoint; the shipped one by default.")
]
Calibration = Annotated[
    Path | None, typer.Option("--calibration", metavar="DIR", help="Result folder of `page4 calibrate`.")
]
_SOURCES = "calibration|file:PATH|layer:N|unit|none"


@app.command("materialise")
def materialise(
    folder: Folder,
    model: Model = None,
    calibration: Calibration = None,
    target: Annotated[
        str, typer.Option(metavar=_SOURCES, help="Where the target's scales come from.")
    ] = "calibration",
    draft: Annotated[
        str, typer.Option(metavar=_SOURCES, help="Where the draft's scales come from.")
    ] = "calibration",
    kv_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="KV format of the scales; the calibration's by default, e4m3 without one.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an overlay for a checkpoint, which is not touched: the whole folder appears, or nothing.

    Scales that were not measured on the layers that they are for (unit, layer:N) are labelled as prototypes.
    """
    from page4.experiments.calibrate.overlay import write_overlay
    from page4.experiments.info import CHECKPOINT
    from page4.model.kv_scales import describe_base

    checkpoint = model or CHECKPOINT
    overlay = write_overlay(folder, checkpoint, calibration, target, draft, kv_format)
    overlays = {overlay.manifest.kv_format: overlay}
    _show(overlays, describe_base(checkpoint))
    if as_json:
        _print_records(overlays)


@app.command("inspect")
def inspect(folder: Existing, model: Model = None, as_json: Json = False) -> None:
    """Show what an overlay holds, layer by layer, once all of it has been checked."""
    from page4.experiments.info import CHECKPOINT, overlay_folder
    from page4.kvcache.overlay_folder import read_overlays
    from page4.model.kv_scales import describe_base

    base = describe_base(model or CHECKPOINT)
    overlays = read_overlays(overlay_folder(folder), base)
    _show(overlays, base)
    if as_json:
        _print_records(overlays)


@app.command("verify")
def verify(
    folder: Existing,
    model: Model = None,
    calibration: Calibration = None,
    kv_format: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="KV format of the target; the overlay's by default."),
    ] = None,
    draft_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="KV format of the draft; the target's by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that an overlay would load: whole, unchanged, of this checkpoint, with all that the formats need.

    With --calibration, also that its scales are bit for bit those of a calibration. Exit status 2: refused.
    """
    from page4.experiments.calibrate.overlay import check_calibration
    from page4.experiments.info import CHECKPOINT, overlay_folder
    from page4.kvcache.overlay_folder import overlay_format, read_overlays
    from page4.kvcache.overlay_scales import overlay_scales
    from page4.model.kv_scales import describe_base

    base = describe_base(model or CHECKPOINT)
    overlays = read_overlays(overlay_folder(folder), base)
    given = kv_format or draft_format
    for target in [kv_format or overlay_format(overlay_folder(folder))] if given else overlays:
        scales = overlay_scales(overlays, base, target, draft_format)
        count = 2 * len(scales.target) + (2 if scales.draft else 0)
        formats = f"{target}, draft {draft_format}" if draft_format else target
        layers = f"{len(scales.target)} of {len(base.layers)} target layers"
        print(f"{folder} in {formats}: {count} scales, {layers}, would load")
    if calibration is not None:
        for overlay in overlays.values():
            check_calibration(overlay, base, calibration)
    if as_json:
        _print_records(overlays)


def _show(overlays: Mapping[str, Overlay], base: OverlayBase) -> None:
    from page4.experiments.calibrate.overlay import overlay_table
    from page4.experiments.cli_study import print_markdown

    for overlay in overlays.values():
        print_markdown(overlay_table(overlay, base))


def _print_records(overlays: Mapping[str, Overlay]) -> None:
    """One overlay as an object, several as an object of them by format."""
    import json

    from page4.experiments.calibrate.overlay import overlay_record

    records = {name: overlay_record(overlay) for name, overlay in overlays.items()}
    print(json.dumps(records if len(records) > 1 else next(iter(records.values()))))
