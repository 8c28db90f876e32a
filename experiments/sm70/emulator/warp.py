"""Threads of a warp that tell each other: shuffles and votes."""

from __future__ import annotations

from typing import Any

import numpy as np

from page4.experiments.sm70.assembly import Immediate, Instruction, Predicate, Register

from .operands import Array, Operands, places
from .operation import Builder, Mask, Operation, Unsupported, allow, result_places
from .threads import WARP
from .undefined import ALL_BITS, PREDICATES


def _source_lanes(kind: str, lane: Array, by: Any, clamp: Any) -> tuple[Array, Array]:
    """Lane that each lane reads, and whether it lies in range (PTX ISA, ``shfl.sync``)."""
    by = np.asarray(by).astype(np.int64) & 31
    clamp = np.asarray(clamp).astype(np.int64)
    segment = clamp >> 8 & 31
    first = lane & segment
    last = first | (clamp & 31 & ~segment)
    if kind == "UP":
        source = lane - by
        valid = source >= last
    else:
        source = {"DOWN": lane + by, "BFLY": lane ^ by, "IDX": first | (by & ~segment)}[kind]
        valid = source <= last
    return np.where(valid, source, lane), valid


def shfl(instruction: Instruction, operands: Operands) -> Operation:
    """A register of another thread; what a thread that takes no part would give is undefined."""
    allow(instruction, "UP", "DOWN", "BFLY", "IDX")
    valid_target, target, source, by_operand, clamp_operand = instruction.operands
    kind = instruction.modifiers[0]
    threads = operands.threads
    value, by, clamp = (operands.bits(operand) for operand in (source, by_operand, clamp_operand))
    write, write_valid = operands.to_register(target), operands.to_predicate(valid_target)
    base = np.arange(threads.count) - threads.lane
    fixed = None
    if isinstance(by_operand, Immediate) and isinstance(clamp_operand, Immediate):
        lanes, in_range = _source_lanes(kind, threads.lane, by(), clamp())
        fixed = base + lanes, in_range

    def reads() -> tuple[Array, Array]:
        if fixed:
            return fixed
        lanes, in_range = _source_lanes(kind, threads.lane, by(), clamp())
        return base + lanes, in_range

    def run(mask: Mask) -> None:
        index, in_range = reads()
        write(np.broadcast_to(value(), threads.count)[index], mask)
        write_valid(in_range, mask)
        if mask is not None:
            silent = mask & ~mask[index]
            if silent.any() and isinstance(target, Register):
                for place in result_places(target):
                    marks = threads.undefined.bits[place].copy()
                    marks[silent] = ALL_BITS
                    threads.undefined.set(place, marks, mask)

    def spread(mask: Mask) -> None:
        index, _ = reads()
        undefined = threads.undefined
        marks: Any = np.zeros(threads.count, np.uint32)
        if isinstance(source, Register):
            marks = undefined.bits[source.number][index]
        for operand in (by_operand, clamp_operand):
            if isinstance(operand, Register):
                marks = np.where(undefined.bits[operand.number] != 0, ALL_BITS, marks)
        for place in result_places(target):
            undefined.set(place, marks, mask)

    sources = places(source, by_operand, clamp_operand)
    return Operation(run, sources, result_places(target, valid_target), spread)


def vote(instruction: Instruction, operands: Operands) -> Operation:
    """Which threads of the warp hold a predicate, as a word; and whether any, all or equally many do."""
    allow(instruction, "ANY", "ALL", "EQ")
    given = list(instruction.operands)
    target = given.pop(0) if isinstance(given[0], Register) else None
    test, asked = given
    if not isinstance(asked, Predicate):
        raise Unsupported("operands")
    kind, threads = instruction.modifiers[0], operands.threads
    value = operands.predicate(asked)
    write_test = operands.to_predicate(test)
    write = operands.to_register(target) if target else None

    def run(mask: Mask) -> None:
        active = np.ones(threads.count, bool) if mask is None else mask
        said = threads.ballots(value() & active)
        present = threads.ballots(active)
        verdict = {"ANY": said != 0, "ALL": said == present, "EQ": (said == 0) | (said == present)}[kind]
        if write:
            write(np.repeat(said, WARP), mask)
        write_test(np.repeat(verdict, WARP), mask)

    def spread(mask: Mask) -> None:
        """One undefined predicate makes the word of its warp undefined."""
        assert isinstance(asked, Predicate)
        wrong = threads.undefined.bits[PREDICATES + asked.number] != 0
        wrong = wrong if mask is None else wrong & mask
        warps = np.repeat(wrong.reshape(-1, WARP).any(1), WARP)
        for place in result_places(*([target] if target else []), test):
            threads.undefined.set(place, warps * ALL_BITS, mask)

    results = result_places(*([target] if target else []), test)
    return Operation(run, places(asked), results, spread)


WARPWIDE: dict[str, Builder] = {"SHFL": shfl, "VOTE": vote}
