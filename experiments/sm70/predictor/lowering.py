"""From a program and its trace to the arrays that the model replays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from page4.experiments.sm70.assembly import Program
from page4.experiments.sm70.predictor.caches import LINE_BYTES, LINE_SECTORS
from page4.experiments.sm70.predictor.launch import EVENT, INSTRUCTION, SECTOR, Records, Traces
from page4.experiments.sm70.predictor.pipes import ISSUE_CYCLES, Kind, kind_of, pipe_of
from page4.experiments.sm70.trace import Trace

_NO_BARRIER = 7


def lower_program(program: Program) -> Records:
    """A program's pipes and control codes, ``[instructions]`` of :data:`INSTRUCTION`."""
    code = np.zeros(len(program.instructions), INSTRUCTION)
    for record, instruction in zip(code, program.instructions, strict=True):
        pipe, control = pipe_of(instruction.opcode), instruction.control
        record["pipe"] = pipe
        record["kind"] = kind_of(instruction.opcode)
        record["cycles"] = ISSUE_CYCLES[pipe]
        record["stall"] = control.stall
        record["keeps"] = not control.yields
        record["write_barrier"] = _NO_BARRIER if control.write_barrier is None else control.write_barrier
        record["read_barrier"] = _NO_BARRIER if control.read_barrier is None else control.read_barrier
        record["wait_mask"] = control.wait_mask
    return code


def lower_trace(program: Program, trace: Trace) -> Traces:
    """A trace with the cycles that every access takes of the load/store unit; blocks do not move yet."""
    events = np.zeros(trace.events + 1, EVENT)
    events["instruction"][:-1] = trace.instructions
    events["wavefronts"][:-1] = _wavefronts(program, trace)
    events["first_sector"] = trace.sector_starts
    sectors = np.zeros(len(trace.sectors), SECTOR)
    sectors["address"] = trace.sectors
    return Traces(trace.warp_starts.astype(np.int64), events, sectors)


def _wavefronts(program: Program, trace: Trace) -> NDArray[np.int64]:
    """Passes over the 128-byte path: bank conflicts of shared memory, lines and bytes of global memory."""
    instructions = program.instructions
    width = np.array([instruction.access_bytes for instruction in instructions])
    kinds = [kind_of(instruction.opcode) for instruction in instructions]
    is_global = np.isin(kinds, (Kind.GLOBAL_LOAD, Kind.GLOBAL_STORE))
    lines = _lines(trace)
    moved = -(-trace.lanes.astype(np.int64) * width[trace.instructions] // LINE_BYTES)
    passes = np.where(is_global[trace.instructions], np.maximum(lines, moved), trace.wavefronts)
    return np.maximum(passes, 1).astype(np.int64)


def _lines(trace: Trace) -> NDArray[np.int64]:
    """Distinct lines that each event touches; its sectors ascend."""
    event = np.repeat(np.arange(trace.events), np.diff(trace.sector_starts))
    line = trace.sectors // LINE_SECTORS
    first = np.ones(len(line), bool)
    first[1:] = (line[1:] != line[:-1]) | (event[1:] != event[:-1])
    return np.bincount(event[first], minlength=trace.events)
