"""`page4 bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from page4.experiments.cli_options import ConfigFile, Device, Json, Out, Overrides, Quick, Seed
from page4.kernels.errors import InputError

Kernel = Annotated[
    str,
    typer.Argument(
        metavar="KERNEL",
        help="qsa_prepare, index_scores, block_select, page4_attention, step, prefill, or all.",
    ),
]


def bench(
    kernel: Kernel = "all",
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    device: Device = None,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Check the kernels against float64 and time them on cold caches, next to PyTorch and to vllm.

    Results go to results/bench, results/bench-KERNEL or --out: a CSV file, table, summary and roofline.
    Exit status 1: a kernel is wrong or does not run.
    """
    from page4.experiments.bench import KERNELS, BenchConfig, run
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config

    if kernel not in ("all", *KERNELS):
        raise InputError(f"{kernel!r} is no kernel, expected one of {', '.join(KERNELS)}, all")
    kernels = None if kernel == "all" else (kernel,)
    config = load_config(
        BenchConfig, config_file, overrides or [], quick=quick, device=device, seed=seed, kernels=kernels
    )
    name = "bench" if kernel == "all" else f"bench-{kernel}"
    summary = run_study("bench", run, config, result_folder(out, name, quick), as_json)
    if summary["wrong"] or summary["failed"]:
        raise typer.Exit(1)
