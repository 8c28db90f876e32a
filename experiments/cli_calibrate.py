"""`page4 calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from page4.experiments.cli_options import ConfigFile, Device, Json, Model, Out, Overrides, Quick


def calibrate(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    device: Device = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
    model: Model = None,
    corpus: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Texts; excerpts of the training text by default.")
    ] = None,
    kv_format: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="KV format that the scales are for.")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(metavar="max|percentile|mse", help="How a scale is chosen.")
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Put calibrations together instead of running; may be repeated."),
    ] = None,
) -> None:
    """Measure |K| and |V| of every sparse layer and of the draft layer, and choose their static scales.

    The model runs with an FP16 cache over texts that share nothing with the evaluation prompts. Results go to
    results/calibrate, or to --out: report, table, figure. `page4 scales materialise` makes an
    overlay of them.
    """
    from page4.experiments.calibrate import CalibrateConfig, run
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config

    config = load_config(
        CalibrateConfig,
        config_file,
        overrides or [],
        quick=quick,
        device=device,
        model=model,
        corpus=corpus,
        kv_format=kv_format,
        rule=rule,
        merge=merge,
    )
    run_study("calibrate", run, config, result_folder(out, "calibrate", quick), as_json)
