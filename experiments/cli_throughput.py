"""`page4 throughput`."""

from __future__ import annotations

from page4.experiments.cli_options import ConfigFile, Device, Json, Out, Overrides, Quick, Seed


def throughput(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    device: Device = None,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Measure prefill, decoding, acceptance and step times by KV format and prompt length, prompt by prompt.

    With --set public_layers=N the first N layers of the public model at full size are timed, with random
    weights. Results go to results/throughput, or to --out: samples, summary with intervals, table, figure.
    """
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config
    from page4.experiments.throughput import ThroughputConfig, run

    config = load_config(
        ThroughputConfig, config_file, overrides or [], quick=quick, device=device, seed=seed
    )
    run_study("throughput", run, config, result_folder(out, "throughput", quick), as_json)
