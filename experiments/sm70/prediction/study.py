"""The predictions from configuration to result folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from page4.experiments.kernel_cases import StepShape
from page4.experiments.progress import Reporter, Silent
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import Row, SampleStore
from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.prediction.attention import FAILURES, attention_digest, predict_attention
from page4.experiments.sm70.prediction.cells import cell_label, cell_of, plan_cells
from page4.experiments.sm70.prediction.columns import (
    ATTENTION_COLUMNS,
    ATTENTION_KEY,
    STEP_KERNEL_COLUMNS,
    STEP_KERNEL_KEY,
)
from page4.experiments.sm70.prediction.config import Implementation, PredictConfig, StepKernel
from page4.experiments.sm70.prediction.report import write_report
from page4.experiments.sm70.prediction.rows import predicted_row, row_without_time
from page4.experiments.sm70.prediction.step_kernels import (
    key_of,
    plan_step_kernels,
    predict_step_kernel,
    step_kernel_digest,
    step_kernel_without_time,
)
from page4.experiments.sm70.toolchain import VERSION, side_install
from page4.kernels.errors import InputError
from page4.kernels.tuning import use_configurations

Predict = Callable[[StepShape, Implementation], Row]
PredictKernel = Callable[[StepKernel, StepShape], Row]


def run(
    config: PredictConfig,
    out: Path,
    progress: Reporter | None = None,
    predict: Predict | None = None,
    predict_kernel: PredictKernel | None = None,
    code_of: Callable[[StepShape, Implementation], str] = attention_digest,
    kernel_code_of: Callable[[StepKernel, StepShape], str] = step_kernel_digest,
) -> dict[str, Any]:
    """Predict what is not yet in the folder, judge everything, and return the content of `summary.json`.

    Args:
        config: The study.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `predictions.csv`
            (attention: a row per step and implementation), `kernels.csv` (a row per step of the other calls),
            `summary.json`, `table.md`, `roofline.png` and `provenance.json`. Rows of kernels, launches or
            configurations that changed since are predicted again, and all when the model did.
        progress: Told of every row.
        predict, predict_kernel: Make the rows; by the emulator and the model if not given.
        code_of, kernel_code_of: Digests of what decides the rows.

    Raises:
        InputError: The Triton that compiles for sm_70 is missing, or the folder cannot be used.
    """
    progress = progress or Silent()
    with use_configurations(config.kernel_configs) as configurations, ResultFolder(out, config) as results:
        rows = results.samples(ATTENTION_COLUMNS, ATTENTION_KEY, "predictions.csv")
        kernels = results.samples(STEP_KERNEL_COLUMNS, STEP_KERNEL_KEY, "kernels.csv")
        steps = list(itertools.product(plan_cells(config), config.implementations))
        calls = plan_step_kernels(config)
        codes = {(*cell_of(step).values(), name): code_of(step, name) for step, name in steps}
        kernel_codes = {key_of(*call): kernel_code_of(*call) for call in calls}
        _remove_changed(rows, codes)
        _remove_changed(kernels, kernel_codes)
        waiting = [task for task in steps if (*cell_of(task[0]).values(), task[1]) not in rows]
        waiting_calls = [task for task in calls if key_of(*task) not in kernels]
        left = len(waiting) + len(waiting_calls)
        total = len(steps) + len(calls)
        progress.start(total, total - left)
        try:
            with ExitStack() as stack:
                if left and (predict is None or predict_kernel is None):
                    compiler = stack.enter_context(_compiler())
                    predict = predict or partial(_row, compiler, config)
                    predict_kernel = predict_kernel or partial(_kernel_row, compiler, config)
                # What takes longest and matters least comes last: plain tl.dot.
                for name in config.implementations:
                    for shape, implementation in waiting:
                        if implementation == name:
                            assert predict is not None
                            code = codes[(*cell_of(shape).values(), name)]
                            rows.add([predict(shape, name) | {"code": code}])
                            progress.advance(f"{cell_label(cell_of(shape))}, {name}")
                    while waiting_calls:
                        assert predict_kernel is not None
                        kernel, shape = waiting_calls.pop(0)
                        code = kernel_codes[key_of(kernel, shape)]
                        kernels.add([predict_kernel(kernel, shape) | {"code": code}])
                        progress.advance(f"{kernel}, {cell_label(cell_of(shape))}")
        finally:  # an interrupted study has a report of what it predicted
            summary = write_report(results, _ordered(rows, codes), _ordered(kernels, kernel_codes), config)
        results.finish(triton=VERSION, kernel_configs=configurations.record())
    return summary


def _remove_changed(samples: SampleStore, codes: Mapping[tuple[Any, ...], str]) -> None:
    """Remove rows of what would be launched otherwise now."""
    samples.remove(lambda row: codes.get(tuple(row[name] for name in samples.key)) != row["code"])


def _ordered(samples: SampleStore, codes: Mapping[tuple[Any, ...], str]) -> list[Row]:
    """Rows in the order of the study, whenever they were predicted."""
    places = {key: place for place, key in enumerate(codes)}
    return sorted(samples.rows, key=lambda row: places[tuple(row[name] for name in samples.key)])


@contextmanager
def _compiler() -> Iterator[Compiler]:
    compiler = Compiler(side_install())
    try:
        yield compiler
    finally:
        compiler.close()


def _row(compiler: Compiler, config: PredictConfig, shape: StepShape, implementation: Implementation) -> Row:
    try:
        step = predict_attention(shape, implementation, compiler, config)
    except InputError as error:
        return row_without_time(shape, implementation, "refused", str(error))
    except FAILURES as error:
        return row_without_time(shape, implementation, "failed", str(error))
    return predicted_row(shape, implementation, step)


def _kernel_row(compiler: Compiler, config: PredictConfig, kernel: StepKernel, shape: StepShape) -> Row:
    try:
        return predict_step_kernel(kernel, shape, compiler, config)
    except InputError as error:
        return step_kernel_without_time(kernel, shape, "refused", str(error))
    except FAILURES as error:
        return step_kernel_without_time(kernel, shape, "failed", str(error))
