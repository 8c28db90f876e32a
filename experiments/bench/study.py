"""The bench from configuration to result folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page4.experiments.bench.cells import Cell, plan_cells
from page4.experiments.bench.config import BenchConfig
from page4.experiments.bench.machine import Machine
from page4.experiments.bench.measure import ABSENT_COLUMNS, COLUMNS, KEY, measure
from page4.experiments.bench.report import write_report
from page4.experiments.bench.warmup import compile_tasks, run_tasks
from page4.experiments.kernel_provenance import study_kernels
from page4.experiments.progress import Reporter, Silent
from page4.experiments.result_folder import ResultFolder
from page4.experiments.samples import SampleStore


def run(
    config: BenchConfig, out: Path, progress: Reporter | None = None, machine: Machine | None = None
) -> dict[str, Any]:
    """Measure what is not yet in the folder, judge everything, and return the content of `summary.json`.

    Args:
        config: The bench.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `bench.csv` (a row
            per cell and implementation), `absent.csv`, `summary.json`, `table.md`, `roofline.png` and
            `provenance.json`.
        progress: Told of every compiled kernel and every cell.
        machine: Where and how it is timed; the GPU of this machine by default.

    Raises:
        InputError: There is no GPU, or the folder cannot be used.
    """
    progress = progress or Silent()
    if machine is None:
        config = config.resolve()
        machine = Machine.gpu(config.replays)
    with (
        study_kernels("triton", config.kernel_configs, machine.device.type) as kernels,
        ResultFolder(out, config, inputs=kernels.digests) as results,
    ):
        rows = results.samples(COLUMNS, KEY, "bench.csv")
        absent = results.samples(ABSENT_COLUMNS, KEY, "absent.csv")
        try:
            _measure(config, machine, rows, absent, progress)
        finally:  # an interrupted bench has a report of what it measured
            summary = write_report(results, rows.rows, absent.rows)
        ceilings = {"copy_bandwidth": machine.copy_bandwidth, "launch_us": machine.launch_us}
        results.finish(**ceilings, **kernels.provenance())
    return summary


def _measure(
    config: BenchConfig, machine: Machine, rows: SampleStore, absent: SampleStore, progress: Reporter
) -> None:
    """Compile for, check and time every cell that has no rows yet."""
    cells = plan_cells(config)
    done = {tuple(row[name] for name in KEY[:-1]) for row in (*rows.rows, *absent.rows)}
    waiting = [cell for cell in cells if cell.key not in done]
    tasks = compile_tasks(waiting, config, machine.device)
    progress.start(len(cells) + len(tasks), len(cells) - len(waiting))
    run_tasks(tasks.values(), machine.device, progress)
    for cell in waiting:
        _measure_cell(cell, config, machine, rows, absent)
        progress.advance(cell.label)


def _measure_cell(
    cell: Cell, config: BenchConfig, machine: Machine, rows: SampleStore, absent: SampleStore
) -> None:
    measured, missing = measure(cell, config, machine)
    if missing:
        absent.add(missing)
    rows.add(measured)
