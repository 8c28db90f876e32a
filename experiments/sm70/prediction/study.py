"""The predictions from configuration to result folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from page4.experiments.kernel_cases import StepShape
from page4.experiments.progress import Reporter, Silent
from page4.experiments.results import ResultFolder
from page4.experiments.samples import Row
from page4.experiments.sm70.binary_cache import source_files
from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.prediction import attention
from page4.experiments.sm70.prediction.attention import FAILURES, predict_attention
from page4.experiments.sm70.prediction.cells import cell_label, cell_of, plan_cells
from page4.experiments.sm70.prediction.config import Implementation, PredictConfig
from page4.experiments.sm70.prediction.report import write_report
from page4.experiments.sm70.prediction.rows import COLUMNS, KEY, predicted_row, row_without_time
from page4.experiments.sm70.predictor.call import v100_stack
from page4.experiments.sm70.toolchain import VERSION, side_install
from page4.kernels.errors import InputError
from page4.kernels.tuning import Configurations, configuration_digests, use_configurations

Predict = Callable[[StepShape, Implementation], Row]


def run(
    config: PredictConfig, out: Path, progress: Reporter | None = None, predict: Predict | None = None
) -> dict[str, Any]:
    """Predict what is not yet in the folder, judge everything, and return the content of `summary.json`.

    Args:
        config: The study.
        out: Result folder, new or begun by the same configuration with the same kernels, model and files of
            configurations. It gets `config.yaml`, `predictions.csv` (a row per step and implementation),
            `summary.json`, `table.md`, `roofline.png` and `provenance.json`.
        progress: Told of every row.
        predict: Makes a row; by the emulator and the model if not given.

    Raises:
        InputError: The Triton that compiles for sm_70 is missing, or the folder cannot be used.
    """
    progress = progress or Silent()
    with _kernels(config) as (configurations, digests), ResultFolder(out, config, inputs=digests) as results:
        rows = results.samples(COLUMNS, KEY, "predictions.csv")
        tasks = [
            (shape, implementation)
            for shape in plan_cells(config)
            for implementation in config.implementations
        ]
        waiting = [task for task in tasks if (*cell_of(task[0]).values(), task[1]) not in rows]
        progress.start(len(tasks), len(tasks) - len(waiting))
        try:
            with _predictor(config, predict, bool(waiting)) as make_row:
                for shape, implementation in waiting:
                    rows.add([make_row(shape, implementation)])
                    progress.advance(f"{cell_label(cell_of(shape))}, {implementation}")
        finally:  # an interrupted study has a report of what it predicted
            summary = write_report(results, rows.rows, config)
        results.finish(triton=VERSION, kernel_configs=configurations.record())
    return summary


@contextmanager
def _kernels(config: PredictConfig) -> Iterator[tuple[Configurations, dict[str, str]]]:
    """Let launchers use the configurations; and digests of all that decides a prediction."""
    with use_configurations(config.kernel_configs) as configurations:
        with v100_stack() as device:
            found = configuration_digests(config.kernel_configs, device)
        digests = {f"kernel_configs/{path}": sha256 for path, sha256 in found.items()}
        yield configurations, digests | {"code": _digest_of_code()}


def _digest_of_code() -> str:
    """SHA-256 of the kernels, their launchers, the emulator and the model."""
    digest = hashlib.sha256(VERSION.encode())
    for file in source_files(Path(attention.__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@contextmanager
def _predictor(config: PredictConfig, given: Predict | None, needed: bool) -> Iterator[Predict]:
    if given is not None or not needed:
        yield given or (lambda shape, implementation: {})
        return
    compiler = Compiler(side_install())
    try:
        yield lambda shape, implementation: _row(shape, implementation, compiler, config)
    finally:
        compiler.close()


def _row(shape: StepShape, implementation: Implementation, compiler: Compiler, config: PredictConfig) -> Row:
    try:
        step = predict_attention(shape, implementation, compiler, config)
    except InputError as error:
        return row_without_time(shape, implementation, "refused", str(error))
    except FAILURES as error:
        return row_without_time(shape, implementation, "failed", str(error))
    return predicted_row(shape, implementation, step)
