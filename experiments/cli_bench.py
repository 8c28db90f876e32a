"""`page4 bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from page4.experiments.cli_options import ConfigFile, Device, Json, Out, Overrides, Quick, Seed
from page4.kernels.errors import InputError

Kernel = Annotated[
    str,
    typer.Argument(
        metavar="KERNEL",
        help="qsa_prepare, index_scores, block_select, page4_attention, planned_attention, prefill, "
        "gated_delta, gated_delta_prefill, mtp_verify, mtp_verify_sampled, mtp_verify_filtered, or all of "
        "these kernels; step: whole decode steps of a model; restore: prefixes from the host tier.",
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

    `step` times decode steps of a checkpoint by format, length and batch, after it has checked that captured
    steps equal eager ones. `restore` brings prefixes back from host memory, alone and beside requests that
    decode, next to computing them again.

    Results go to results/bench, results/bench-KERNEL or --out: a CSV file, table, summary and a figure.
    Exit status 1: something is wrong or does not run.
    """
    if kernel in ("step", "restore"):
        one = _bench_step if kernel == "step" else _bench_restore
        one(config_file, overrides, device, seed, out, quick, as_json)
        return
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


def _bench_step(
    config_file: Path | None,
    overrides: list[str] | None,
    device: str | None,
    seed: int | None,
    out: Path | None,
    quick: bool,
    as_json: bool,
) -> None:
    from page4.experiments.bench.step_config import StepBenchConfig
    from page4.experiments.bench.step_study import run
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config

    config = load_config(StepBenchConfig, config_file, overrides or [], quick=quick, device=device, seed=seed)
    if run_study("bench step", run, config, result_folder(out, "bench-step", quick), as_json)["wrong"]:
        raise typer.Exit(1)


def _bench_restore(
    config_file: Path | None,
    overrides: list[str] | None,
    device: str | None,
    seed: int | None,
    out: Path | None,
    quick: bool,
    as_json: bool,
) -> None:
    from page4.experiments.bench.restore_config import RestoreBenchConfig
    from page4.experiments.bench.restore_study import run
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config

    config = load_config(
        RestoreBenchConfig, config_file, overrides or [], quick=quick, device=device, seed=seed
    )
    folder = result_folder(out, "bench-restore", quick)
    if run_study("bench restore", run, config, folder, as_json)["wrong"]:
        raise typer.Exit(1)
