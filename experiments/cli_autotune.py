"""`page4 autotune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from page4.experiments.cli_options import ConfigFile, Json, Out, Overrides, Quick, Seed


def autotune(
    kernel: Annotated[str, typer.Argument(metavar="KERNEL|all", help="What to tune.")] = "all",
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
    target: Annotated[
        str | None, typer.Option("--target", metavar="sm70", help="Predict for a V100 instead of measuring.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="List the shipped configurations instead.")] = False,
) -> None:
    """Find the fastest configuration of kernels on this GPU for a list of steps, and record them as JSON.

    Results go to results/autotune, or to --out: every trial, a table, and a folder `configs` that
    `--set kernel_configs=FOLDER` makes a study use. `--set seconds=N` limits the time; the most important
    steps come first, and the same command goes on where it stopped.

    With `--target sm70` configurations are ranked by their predicted times on a V100, without a GPU, and
    recorded as predicted; results go to results/autotune-sm70.
    """
    if show:
        _show(kernel)
        return
    if target is not None:
        _predict(kernel, target, config_file, overrides, seed, out, quick, as_json)
        return
    from page4.experiments.autotune import AutotuneConfig, run
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config

    kernels = None if kernel == "all" else (kernel,)
    config = load_config(
        AutotuneConfig, config_file, overrides or [], quick=quick, seed=seed, kernels=kernels
    )
    run_study("autotune", run, config, result_folder(out, "autotune", quick), as_json)


def _predict(
    kernel: str,
    target: str,
    config_file: Path | None,
    overrides: list[str] | None,
    seed: int | None,
    out: Path | None,
    quick: bool,
    as_json: bool,
) -> None:
    from page4.experiments.cli_sm70 import require_numba
    from page4.kernels.errors import InputError

    if target != "sm70":
        raise InputError(f"--target predicts for sm70 (a V100), got {target!r}")
    require_numba("page4 autotune --target sm70")
    from page4.experiments.autotune.predicted_config import PredictedTuningConfig
    from page4.experiments.autotune.predicted_study import run
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config

    kernels = None if kernel == "all" else (kernel,)
    config = load_config(
        PredictedTuningConfig, config_file, overrides or [], quick=quick, seed=seed, kernels=kernels
    )
    run_study("autotune for sm70", run, config, result_folder(out, "autotune-sm70", quick), as_json)


def _show(kernel: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from page4.experiments.autotune.shipped import entry_rows, shipped_files
    from page4.kernels.tunable import get_tunable

    names = None if kernel == "all" else {get_tunable(kernel).name}
    files = [file for file in shipped_files() if names is None or file.kernel.name in names]
    console = Console()
    if not files:
        console.print("no configurations are shipped: every kernel decides by rule")
    for file in files:
        rows = entry_rows(file)
        table = Table(title=f"{file.kernel.name}, {file.gpu}, Triton {file.triton}", title_justify="left")
        for name in rows[0] if rows else ():
            table.add_column(name)
        for row in rows:
            table.add_row(*map(str, row.values()))
        console.print(table)
