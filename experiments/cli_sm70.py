"""`page4 sm70`: what can be known of code for a V100 without one."""

from __future__ import annotations

from typing import Annotated

import typer

from page4.experiments.cli_options import ConfigFile, Json, Out, Overrides, Quick, Seed

app = typer.Typer(help="Machine code for a V100 (sm_70), without a V100.", no_args_is_help=True)

Thorough = Annotated[
    bool, typer.Option("--thorough", help="Every combination of format, head dimension, rows and heads.")
]


@app.command("check")
def check(thorough: Thorough = False, as_json: Json = False) -> None:
    """Compile every kernel of the hot path for sm_70, sm_80 and sm_90, and check its machine code.

    Target, spills, shared memory, tensor cores, data types and the width of memory accesses. Needs no GPU,
    but the Triton that `make sm70` unpacks. What was compiled before is taken from .cache/sm70.
    Exit status 1: a kernel breaks a promise that it is not known to break.
    """
    import json
    import sys

    from rich.console import Console

    from page4.experiments.progress import progress_on
    from page4.experiments.sm70 import check_report
    from page4.experiments.sm70.check import check_all

    with progress_on(sys.stderr, "sm70 check") as progress:
        results = check_all(thorough=thorough, progress=progress)
    # A table in a log is wider than the 80 columns that are assumed for one.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(check_report.table(results))
    for line in check_report.remarks(results):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if as_json:
        print(json.dumps(check_report.record(results)))
    if not all(result.passed for result in results):
        raise typer.Exit(1)


@app.command("predict")
def predict(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Predict the times of attention and merge on a V100, beside plain tl.dot and the floor of their bytes.

    Machine code is executed on the CPU and replayed through a model of the GPU: nothing is measured. Needs
    the Triton that `make sm70` unpacks. Results go to results/sm70-predict or --out: a CSV file, table,
    summary and roofline. Exit status 1: a kernel does not compile or does not run.
    """
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config
    from page4.experiments.sm70.prediction.config import PredictConfig

    config = load_config(PredictConfig, config_file, overrides or [], quick=quick, seed=seed)
    require_numba("page4 sm70 predict")
    from page4.experiments.sm70.prediction.study import run

    folder = result_folder(out, "sm70-predict", quick)
    summary = run_study("sm70 predict", run, config, folder, as_json)
    if summary["failed"]:
        raise typer.Exit(1)


@app.command("validate")
def validate(
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    as_json: Json = False,
    allow_other_gpu: Annotated[
        bool,
        typer.Option(
            "--allow-other-gpu",
            help="Measure on another GPU, to see that this works; compares nothing.",
        ),
    ] = False,
) -> None:
    """Measure on a real V100 what was predicted, compare, and leave a folder to send back.

    The steps are those of experiments/results/sm70, or of --set predictions=FOLDER. Every result is checked
    before it is timed. Results go to results/sm70-validate or --out: report, measurements and provenance.
    """
    from page4.experiments.cli_study import result_folder, run_study
    from page4.experiments.config import load_config
    from page4.experiments.sm70.validation.config import ValidateConfig
    from page4.experiments.sm70.validation.study import run

    config = load_config(
        ValidateConfig,
        config_file,
        overrides or [],
        quick=quick,
        seed=seed,
        other_gpu=allow_other_gpu or None,
    )
    folder = result_folder(out, "sm70-validate", quick)
    run_study("sm70 validate", run, config, folder, as_json)
    typer.echo(f"report: {folder / 'report.md'}", err=True)


def require_numba(command: str) -> None:
    """Refuse a command that predicts where the model of the GPU cannot run.

    Raises:
        InputError: numba is not installed.
    """
    from page4.kernels.errors import InputError

    try:
        import numba  # noqa: F401
    except ImportError as error:
        raise InputError(f"{command} needs numba: in the repository, pip install -e '.[sm70]'") from error


@app.callback()
def sm70() -> None:
    """Machine code for a V100 (sm_70), without a V100."""
