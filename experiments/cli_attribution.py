"""`page4 attribution`."""

from __future__ import annotations

from typing import Annotated

import typer

from page4.experiments.cli_options import ConfigFile, Device, Json, Out, Overrides, Quick, Seed


def attribution(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    device: Device = None,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
    kv_format: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="KV format whose loss is attributed.")
    ] = None,
) -> None:
    """Ask where the acceptance lost to an 8-bit KV cache comes from, and which 8-bit formats lose none.

    The format in some layers only, Gaussian noise in its place, wrong scales, frozen selection, other
    formats; all on the rounds of `page4 acceptance`, on the reference layers. Results go to
    results/attribution, or to --out: samples, summary with confidence intervals, tables, a figure.
    """
    from page4.experiments.attribution import AttributionConfig, run
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config

    config = load_config(
        AttributionConfig,
        config_file,
        overrides or [],
        quick=quick,
        device=device,
        seed=seed,
        kv_format=kv_format,
    )
    run_study("attribution", run, config, result_folder(out, "attribution", quick), as_json)
