"""`page4 quant-error`."""

from __future__ import annotations

from page4.experiments.cli_options import ConfigFile, Device, Json, Out, Overrides, Quick, Seed


def quant_error(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    device: Device = None,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Measure what KV formats and scale rules change: K and V, attention outputs, selections, logits, loss.

    By layer, position and context length, against an unquantised cache on the same real text, with the theory
    of rounding beside it. Results go to results/quant-error, or to --out: samples, summary with confidence
    intervals, table, figures.
    """
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config
    from page4.experiments.quant_error import QuantErrorConfig, run

    config = load_config(
        QuantErrorConfig, config_file, overrides or [], quick=quick, device=device, seed=seed
    )
    run_study("quant-error", run, config, result_folder(out, "quant-error", quick), as_json)
