"""`page4 capacity`."""

from __future__ import annotations

from page4.experiments.cli_options import ConfigFile, Json, Out, Overrides


def capacity(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Count the bytes of caches by KV format, and what fits on a GPU; needs neither weights nor a GPU.

    For the public checkpoint's geometry, or that of a model: --set geometry=FOLDER. Other settings are
    tensor_parallel, contexts, concurrency, gpu_gib, reserved_gib, formats and num_draft_tokens.

    Results go to results/capacity or --out: a CSV file, table, summary and a figure.
    """
    from page4.experiments.capacity import CapacityConfig, run
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config

    config = load_config(CapacityConfig, config_file, overrides or [])
    run_study("capacity", run, config, result_folder(out, "capacity", quick=False), as_json)
