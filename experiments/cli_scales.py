"""`page4 scales`: overlays of static KV scales."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from page4.experiments.cli_options import Json

app = typer.Typer(
    help="Overlays of static KV scales, in a folder beside the checkpoint.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The overlay.")]
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
        str, typer.Option("--format", metavar="FORMAT", help="KV format of an overlay without calibration.")
    ] = "e4m3",
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
    _show(overlay, describe_base(checkpoint), as_json)


@app.command("inspect")
def inspect(folder: Folder, model: Model = None, as_json: Json = False) -> None:
    """Show what an overlay holds, layer by layer, once all of it has been checked."""
    from page4.experiments.info import CHECKPOINT
    from page4.kvcache.overlay import read_overlay
    from page4.model.kv_scales import describe_base

    base = describe_base(model or CHECKPOINT)
    _show(read_overlay(folder, base), base, as_json)


@app.command("verify")
def verify(
    folder: Folder,
    model: Model = None,
    calibration: Calibration = None,
    kv_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="KV format of the target.")
    ] = "e4m3",
    draft_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="KV format of the draft; the target's by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that an overlay would load: whole, unchanged, of this checkpoint, with all that the formats need.

    With --calibration, also that its scales are bit for bit those of a calibration. Exit status 2: refused.
    """
    import json

    from page4.experiments.calibrate.overlay import check_calibration, overlay_record
    from page4.experiments.info import CHECKPOINT
    from page4.kvcache.overlay import read_overlay
    from page4.model.kv_scales import describe_base

    base = describe_base(model or CHECKPOINT)
    overlay = read_overlay(folder, base)
    scales = overlay.scales(base, kv_format, draft_format)
    if calibration is not None:
        check_calibration(overlay, base, calibration)
    count = 2 * len(scales.target) + (2 if scales.draft else 0)
    print(f"{folder}: {count} scales, {len(scales.target)} of {len(base.layers)} target layers, would load")
    if as_json:
        print(json.dumps(overlay_record(overlay)))


def _show(overlay: object, base: object, as_json: bool) -> None:
    import json

    from page4.experiments.calibrate.overlay import overlay_record, overlay_table
    from page4.experiments.cli_study import print_markdown
    from page4.kvcache.overlay import Overlay, OverlayBase

    assert isinstance(overlay, Overlay) and isinstance(base, OverlayBase)
    print_markdown(overlay_table(overlay, base))
    if as_json:
        print(json.dumps(overlay_record(overlay)))
