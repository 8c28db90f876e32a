"""Tuning from configuration to files of tuned configurations."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import page4.kernels.tuning
from page4.experiments.autotune.choice import OUTCOMES, Trial
from page4.experiments.autotune.compiling import Compiled, CompilerPool
from page4.experiments.autotune.config import AutotuneConfig
from page4.experiments.autotune.machine import Machine, this_gpu
from page4.experiments.autotune.predicted_config import PredictedTuningConfig
from page4.experiments.autotune.problem import Bench, Candidates, Cell, Problem
from page4.experiments.autotune.problems import PROBLEMS, problems_on
from page4.experiments.autotune.record import (
    TRIAL_COLUMNS,
    TRIAL_KEY,
    record,
    results,
    table,
    trial_rows,
)
from page4.experiments.autotune.rounds import first_round, next_round
from page4.experiments.progress import Reporter, Silent
from page4.experiments.result_folder import ResultFolder
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_dispatch import device_capability
from page4.kernels.tuning import triton_version

_AHEAD = 3  # cells that are compiled while one is timed


@dataclass
class _Job:
    """A cell on its way: what is being compiled for it, and the trials of earlier rounds."""

    cell: Cell
    found: Candidates
    futures: dict[Any, Future[Compiled]]
    trials: list[Trial] = field(default_factory=list)


def run(
    config: AutotuneConfig, out: Path, progress: Reporter | None = None, machine: Machine | None = None
) -> dict[str, Any]:
    """Tune what is not yet in the folder, record it, and return the content of `summary.json`.

    Args:
        config: What to tune.
        out: Result folder, new or begun by the same configuration. It gets `config.yaml`, `inputs.json`,
            `trials.csv` (every configuration tried), `table.md`, `summary.json`, `provenance.json` and,
            unless the configuration names another folder, `configs`.
        progress: Told of every kernel at every step.
        machine: Where to run; None is the current GPU.

    Raises:
        InputError: No GPU, nothing that can be tuned, or an unusable folder.
    """
    machine = machine or this_gpu(config.replays)
    started = machine.now()
    progress = progress or Silent()
    cells = plan_cells(config, problems_on(device_capability(machine.device)))
    if not cells:
        raise InputError("none of these kernels reads any of these KV formats")
    inputs = {"gpu": machine.gpu, "triton": triton_version(), "kernels": _kernel_digest()}
    with ResultFolder(out, config.question(), inputs=inputs) as folder:
        trials = folder.samples(TRIAL_COLUMNS, TRIAL_KEY, "trials.csv")
        configs = config.configs or out / "configs"
        found = results(cells, trials.rows)
        done = {result.cell for result in found}
        waiting = [cell for cell in cells if cell not in done]
        progress.start(len(cells), len(done))
        deadline = started + config.seconds if config.seconds else math.inf
        for cell, default, tried in _tune(waiting, config, machine, deadline):
            trials.add(trial_rows(cell, tried, default, datetime.now(UTC).date().isoformat()))
            found = results(cells, trials.rows)
            record(configs, found, machine.gpu, triton_version())
            progress.advance(str(cell))
        files = record(configs, found, machine.gpu, triton_version())
        counts = {name: sum(result.counts[name] for result in found) for name in OUTCOMES}
        left = len(cells) - len(found)
        summary = {
            "tuned": sum(result.entry is not None for result in found),
            "left": left,
            "trials": counts,
            "files": [file.relative_to(configs).as_posix() for file in files],
        }
        note = f"\n{counts['timed']} configurations timed; not timed: "
        note += ", ".join(f"{counts[name]} {name}" for name in OUTCOMES[1:]) + "."
        note += f" {left} of {len(cells)} left: run again to go on." if left else ""
        folder.write_text("table.md", table(found) + note + "\n")
        folder.write_json("summary.json", summary)
        folder.finish()
    return summary


def plan_cells(
    config: AutotuneConfig | PredictedTuningConfig, problems: Mapping[str, Problem] = PROBLEMS
) -> list[Cell]:
    """Every kernel at every step that it can run, in the order of importance.

    Of steps with one key the first decides, and the others are left out.
    """
    cells: dict[tuple[str, Any], Cell] = {}
    for step in config.steps:
        for problem in (problems[name] for name in config.kernel_names):
            if problem.possible(step):
                cells.setdefault((problem.name, problem.key(step)), Cell(problem, step))
    return list(cells.values())


def _tune(
    cells: Sequence[Cell], config: AutotuneConfig, machine: Machine, deadline: float
) -> Iterator[tuple[Cell, Any, list[Trial]]]:
    """Cells in order with their default configuration and trials, until the machine's clock says deadline."""
    if not cells:
        return
    with CompilerPool(config.processes, machine.device) as pool:
        jobs: deque[_Job] = deque()
        waiting = iter(cells)
        while machine.now() < deadline:
            while len(jobs) <= _AHEAD and (cell := next(waiting, None)) is not None:
                found = Candidates.of(cell, machine, config.seed)
                jobs.append(
                    _Job(cell, found, _submit(pool, cell, found, first_round(found.configs, found.default)))
                )
            if not jobs:
                return
            job = jobs.popleft()
            patience = None if deadline == math.inf else max(0.0, deadline - machine.now())
            if wait_for(job.futures.values(), timeout=patience).not_done:
                return
            compiled = {c: future.result() for c, future in job.futures.items()}
            bench = Bench(job.cell, machine, config.seed)
            job.trials += try_all(compiled, job.found.default, bench, machine)
            del bench  # its memory is needed for the next one
            if more := next_round(job.found.configs, job.trials):
                job.futures = _submit(pool, job.cell, job.found, more)
                jobs.append(job)
            else:
                yield job.cell, job.found.default, job.trials


def _submit(
    pool: CompilerPool, cell: Cell, found: Candidates, configs: Sequence[Any]
) -> dict[Any, Future[Compiled]]:
    return {config: pool.submit(cell.kernel, found.outline, config) for config in configs}


def try_all(compiled: Mapping[Any, Compiled], default: Any, bench: Bench, machine: Machine) -> list[Trial]:
    """A trial of every configuration that compiled: checked first, and timed if it is right.

    What spills is skipped, but not the default configuration: it is what the others are held against.
    """
    trials = []
    for config, state in compiled.items():
        if state.error is not None:
            trials.append(Trial(config, "fails", note=state.error))
        elif state.spills and config != default:
            trials.append(Trial(config, "spills", note=f"{state.spills} registers"))
        elif (wrong := bench.difference(config)) is not None:
            trials.append(Trial(config, "wrong", note=wrong))
        else:
            trials.append(Trial(config, "timed", machine.time_us(bench.launches(config))))
    return trials


def _kernel_digest() -> str:
    """SHA-256 over the kernels' sources: other sources make other times."""
    digest = hashlib.sha256()
    for file in sorted(Path(page4.kernels.tuning.__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
