"""Configurations for a V100 that is not there: which are possible, and how long each is predicted to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from page4.experiments.autotune.choice import Trial
from page4.experiments.autotune.machine import Machine
from page4.experiments.autotune.predicted_config import KINDS, PredictedTuningConfig
from page4.experiments.autotune.problem import Cell
from page4.experiments.autotune.rounds import first_round, next_round, tile_of
from page4.experiments.sm70.compiling import CompilationError, Compiler
from page4.experiments.sm70.emulator import EmulationError
from page4.experiments.sm70.predictor.call import (
    CAPABILITY,
    KernelPrediction,
    launches_on_v100,
    own_storages,
    v100_stack,
)
from page4.experiments.sm70.predictor.call_digest import call_digest
from page4.experiments.sm70.predictor.machine import V100
from page4.experiments.sm70.predictor.ranking import rank_predictions
from page4.experiments.sm70.predictor.step import STEP_INPUTS, predict_call
from page4.experiments.sm70.promises import SHARED_BYTES
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_triton import multiprocessor_count
from page4.kernels.tunable import TUNABLE
from page4.kernels.tuning import device_name

PredictedOutcome = Literal["predicted", "spills", "fails"]
PREDICTED_OUTCOMES: tuple[PredictedOutcome, ...] = ("predicted", "spills", "fails")


@dataclass(frozen=True)
class PredictedTrial:
    """What became of a configuration.

    Attributes:
        config: of the kernel.
        outcome: ``predicted``; or left out because it ``spills`` registers or ``fails`` to compile or to run.
        us: microseconds of a call's kernels, without what passes between them. Of what spills only the
            default has a time, to hold the others against.
        registers: a thread, of the kernel that takes longest.
        note: the kernels and their times, or why there are none.
        code: digest of what the configuration launches: the trial counts until that changes.
    """

    config: Any
    outcome: PredictedOutcome
    us: float | None = None
    registers: int | None = None
    note: str = ""
    code: str = ""


def best_of(trials: Sequence[PredictedTrial]) -> PredictedTrial | None:
    """The trial to record: see :func:`~page4.experiments.sm70.predictor.ranking.rank_predictions`.

    None when nothing was predicted.
    """
    timed = [
        (trial, trial.us, trial.registers)
        for trial in trials
        if trial.outcome == "predicted" and trial.us is not None and trial.registers is not None
    ]
    return rank_predictions(timed)[0] if timed else None


def fastest_of(trials: Sequence[PredictedTrial]) -> PredictedTrial | None:
    """The trial with the shortest prediction, ties or not; none that spills."""
    timed = [trial for trial in trials if trial.outcome == "predicted"]
    return min(timed, key=lambda trial: trial.us or math.inf, default=None)


def possible_configs(cell: Cell, config: PredictedTuningConfig) -> tuple[Any, list[Any]]:
    """The default of a cell on a V100, and all configurations to try, the default first."""
    inputs = _counted_inputs(cell, config)
    with v100_stack() as device:
        machine = Machine(
            device, device_name(device), multiprocessor_count(device), SHARED_BYTES[CAPABILITY],
            time_us=_not_here, cold_copies=_not_here,
        )  # fmt: skip
        whole = inputs()
        default = cell.problem.default(whole)
        found = [default, *cell.problem.candidates(whole, machine)]
        if KINDS[cell.kernel] == "attention":
            programs = whole.groups * whole.kv_heads
            least = config.least_programs * machine.multiprocessors
            found = _busy(found, default, programs, least)
    kept = _thinned(list(dict.fromkeys(found)), default, config.splits_step)
    return default, _possible(cell, kept)


def try_predicted(
    cell: Cell,
    known: Mapping[str, PredictedTrial],
    only: Any | None,
    compiler: Compiler,
    config: PredictedTuningConfig,
    spilling: set[tuple[Any, ...]],
) -> tuple[Any, list[PredictedTrial]]:
    """Predict a cell's configurations in two rounds; returns its default and the trials.

    ``known`` trials of the cell, by their code, are taken over; configurations of one code take as long.
    With ``only`` one configuration there is nothing else to try than that and the default. Tiles that spilled
    in a cell with other requests are not compiled again: ``spilling`` remembers them.
    """
    default, configs = possible_configs(cell, config)
    if only is not None:
        configs = list(dict.fromkeys([default, *_possible(cell, [only])]))
    trials: list[PredictedTrial] = []
    by_code = dict(known)
    # Tiles are compared where about every multiprocessor has a program, wherever the default is.
    nearest = first_round(configs[1:], _filling(cell, default))
    waiting = [default, *(candidate for candidate in nearest if candidate in configs[1:])]
    while waiting:
        for candidate in waiting:
            place = (cell.kernel, dataclasses.replace(cell.step, requests=1), tile_of(candidate))
            if place in spilling and candidate != default:
                trials.append(PredictedTrial(candidate, "spills", note="as with other splits"))
                continue
            code = call_digest(_call(cell, candidate))
            is_default = candidate == default
            if code not in by_code or (
                is_default and by_code[code].outcome == "spills" and by_code[code].us is None
            ):
                by_code[code] = dataclasses.replace(
                    _try(cell, candidate, is_default, compiler, config), code=code
                )
            trials.append(dataclasses.replace(by_code[code], config=candidate))
            if trials[-1].outcome == "spills":
                spilling.add(place)
        times = [
            Trial(trial.config, "timed", trial.us)
            if trial.outcome == "predicted"
            else Trial(trial.config, "fails")
            for trial in trials
        ]
        waiting = next_round(configs, times, config.kept_tiles)
    return default, trials


def _filling(cell: Cell, default: Any) -> Any:
    """Attention's default with splits that make a program for every multiprocessor; others as they are."""
    if KINDS[cell.kernel] != "attention":
        return default
    programs = cell.key.groups * cell.key.kv_heads
    return dataclasses.replace(default, splits=max(1, V100.multiprocessors // programs))


def _try(
    cell: Cell, candidate: Any, is_default: bool, compiler: Compiler, config: PredictedTuningConfig
) -> PredictedTrial:
    try:
        launches = launches_on_v100(_call(cell, candidate))
        stacks = [compiler.compile(launch.job(CAPABILITY)).stack_bytes for launch in launches]
        note = f"{max(stacks)} bytes a thread"
        # The default is what the others are held against.
        if max(stacks) and not is_default:
            return PredictedTrial(candidate, "spills", note=note)
        kernels, _ = predict_call(
            KINDS[cell.kernel],
            cell.step,
            lambda inputs: cell.problem.run(inputs, candidate),
            compiler,
            most_replayed=config.most_replayed_requests,
            most_blocks=config.most_blocks,
            seed=config.seed,
        )
    except (InputError, CompilationError, EmulationError) as error:
        return PredictedTrial(candidate, "fails", note=" ".join(str(error).split())[:200])
    trial = _predicted(candidate, kernels)
    if max(stacks):
        return dataclasses.replace(trial, outcome="spills", note=f"{trial.note}; {note}")
    return trial


def _call(cell: Cell, candidate: Any) -> Callable[[], object]:
    """Calls a cell's launcher on inputs without values."""
    inputs = STEP_INPUTS[KINDS[cell.kernel]]
    return lambda: cell.problem.run(own_storages(inputs.without_values(cell.step)), candidate)


def _predicted(candidate: Any, kernels: Sequence[KernelPrediction]) -> PredictedTrial:
    longest = max((kernel.prediction for kernel in kernels), key=lambda prediction: prediction.us)
    return PredictedTrial(
        candidate,
        "predicted",
        sum(kernel.prediction.us for kernel in kernels),
        longest.static.registers,
        " + ".join(f"{kernel.kernel} {kernel.prediction.us:.1f}" for kernel in kernels),
    )


def _possible(cell: Cell, configs: Sequence[Any]) -> list[Any]:
    """Those that calls of the cell can have."""
    found = []
    for candidate in configs:
        try:
            TUNABLE[cell.kernel].check(cell.key, candidate)
        except InputError:
            continue
        found.append(candidate)
    return found


def _counted_inputs(cell: Cell, config: PredictedTuningConfig) -> Any:
    """Makes a cell's inputs without values, but for the lengths of lists, which candidates depend on."""
    inputs = STEP_INPUTS[KINDS[cell.kernel]]
    if KINDS[cell.kernel] != "attention":
        return lambda: inputs.without_values(cell.step)
    one = dataclasses.replace(cell.step, requests=1)
    counts = inputs.with_values(one, "cpu", config.seed)[0].plan.counts.repeat(cell.step.requests)

    def make() -> Any:
        whole = inputs.without_values(cell.step)
        return dataclasses.replace(whole, plan=dataclasses.replace(whole.plan, counts=counts))

    return make


def _busy(configs: list[Any], default: Any, programs: int, least: float) -> list[Any]:
    """Attention's configurations that make ``least`` programs of ``programs``, or as many as a tile can."""
    most: dict[Any, int] = {}
    for candidate in configs[1:]:
        tile = tile_of(candidate)
        most[tile] = max(most.get(tile, 0), candidate.splits)
    return [
        candidate
        for candidate in configs
        if candidate == default
        or candidate.splits == most[tile_of(candidate)]
        or candidate.splits * candidate.head_splits * programs >= least
    ]


def _thinned(configs: list[Any], default: Any, step: float) -> list[Any]:
    """Of every tile the splits that are a ratio apart, and those nearest to the default's."""
    by_tile: dict[Any, list[Any]] = {}
    for candidate in configs:
        by_tile.setdefault(tile_of(candidate), []).append(candidate)
    kept = [found for tile in by_tile.values() for found in _apart(tile, step)]
    return list(dict.fromkeys([default, *first_round(configs, default), *kept]))


def _apart(tile: list[Any], step: float) -> Iterator[Any]:
    last = 0.0
    for candidate in sorted(tile, key=lambda config: getattr(config, "splits", 1)):
        splits = getattr(candidate, "splits", 1)
        if splits >= last * step:
            last = splits
            yield candidate


def _not_here(_: object) -> Any:
    raise AssertionError("nothing is measured on a GPU that is not there")
