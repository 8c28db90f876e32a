"""`page4 acceptance`."""

from __future__ import annotations

from page4.experiments.cli_options import (
    AllowUnit,
    ConfigFile,
    Device,
    Json,
    Out,
    Overrides,
    Quick,
    Scales,
    Seed,
)


def acceptance(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    device: Device = None,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
    scales: Scales = None,
    allow_unit_target_scales: AllowUnit = False,
) -> None:
    """Measure MTP acceptance against context length, between KV formats, on paired prompts.

    Results go to results/acceptance, or to --out: samples, summary with confidence intervals, table, figures.
    """
    from page4.experiments.acceptance import AcceptanceConfig, run
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config

    config = load_config(
        AcceptanceConfig,
        config_file,
        overrides or [],
        quick=quick,
        device=device,
        seed=seed,
        scales=scales,
        allow_unit_target_scales=allow_unit_target_scales or None,
    )
    run_study("acceptance", run, config, result_folder(out, "acceptance", quick), as_json)
