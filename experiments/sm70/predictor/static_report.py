"""What a program's text alone says of its time on a V100."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from page4.experiments.sm70.assembly import Program
from page4.experiments.sm70.predictor.machine import STREAM_BYTES_PER_SECOND
from page4.experiments.sm70.predictor.occupancy import Occupancy, occupancy
from page4.experiments.sm70.predictor.pipes import SPILLS, Pipe, pipe_of


@dataclass(frozen=True)
class StaticReport:
    """A kernel's resources and instructions.

    Attributes:
        registers: per thread.
        shared_bytes: per block.
        spills: loads and stores of local memory in the text.
        occupancy: blocks on a multiprocessor, and their limit.
        instructions: in the text, by pipe; those of loops count once.
        loop_instructions: of those, how many stand in innermost loops.
        hmma: tensor-core steps in the text; four make a product of 8 x 8 x 4 per quad-pair.
    """

    registers: int
    shared_bytes: int
    spills: int
    occupancy: Occupancy
    instructions: dict[Pipe, int]
    loop_instructions: dict[Pipe, int]
    hmma: int


def static_report(program: Program, shared_bytes: int, warps: int) -> StaticReport:
    """Read a program.

    Args:
        program: with the registers that it needs.
        shared_bytes: of a block.
        warps: of a block.

    Raises:
        InputError: not even one block fits on a multiprocessor.
    """
    instructions = program.instructions[: _end(program)]
    looped = {
        index
        for first, last in program.loops
        if not any((first, last) != (a, b) and first <= a and b <= last for a, b in program.loops)
        for index in range(first, last + 1)
    }
    return StaticReport(
        registers=program.registers,
        shared_bytes=shared_bytes,
        spills=sum(instruction.opcode in SPILLS for instruction in instructions),
        occupancy=occupancy(program.registers, shared_bytes, warps),
        instructions=dict(Counter(pipe_of(instruction.opcode) for instruction in instructions)),
        loop_instructions=dict(Counter(pipe_of(i.opcode) for i in instructions if i.index in looped)),
        hmma=sum(instruction.opcode == "HMMA" for instruction in instructions),
    )


def dram_floor_us(floor_bytes: int) -> float:
    """Microseconds that bytes take at the bandwidth that Triton's streams reach on a V100."""
    return 1e6 * floor_bytes / STREAM_BYTES_PER_SECOND


def _end(program: Program) -> int:
    """Where the padding behind the program begins: no-operations and a branch to itself."""
    end = len(program.instructions)
    while end > 1 and program.instructions[end - 1].opcode == "NOP":
        end -= 1
    return end - 1 if end > 1 and program.instructions[end - 1].opcode == "BRA" else end
