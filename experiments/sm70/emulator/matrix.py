"""``HMMA.884``: the tensor cores of compute capability 7.0.

A warp is four quad-pairs: threads 4q..4q+3 and 16+4q..16+4q+3 multiply an 8 x 4 matrix A with a 4 x 8 matrix
B and add to 8 x 8 accumulators, as ``mma.sync.m8n8k4`` of the PTX ISA says. The assembler makes four
instructions of one, ``.STEP0`` to ``.STEP3``, each for two of a thread's eight accumulators.

Both operands are two registers with four halves. ``A.ROW``: a thread has a row; ``A.COL``: a thread has four
rows of one column, those of its half. ``B`` likewise with rows for columns: ``B.COL``: a thread has a column.
Products are exact, and one accumulator's four are added to it with one rounding. The hardware's own order of
these sums is not documented, and differs by its rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from page4.experiments.sm70.assembly import ZERO_REGISTER, Instruction, Register

from .operands import Array, Operands
from .operation import Builder, Mask, Operation, Unsupported, allow
from .rounding import canonical
from .threads import WARP
from .undefined import ALL_BITS

_DEPTH = 4


def _quad_pair_threads(lane: Array) -> Array:
    """``[..., 8]``, the threads of the quad-pair of a thread, in the order of their rows."""
    first = lane // 4 % 4 * 4
    return first[..., None] + np.array([0, 1, 2, 3, 16, 17, 18, 19])


def accumulator_place(lane: Array, index: int) -> tuple[Array, Array]:
    """Row and column of a thread's accumulator 0 to 7."""
    row = (lane & 1) + (index & 2) + np.where(lane >= 16, 4, 0)
    column = (index & 4) + (lane & 2) + (index & 1)
    return row, column


def fragment_source(lane: Array, place: Array, *, whole: bool) -> tuple[Array, Array]:
    """``[..., 4]`` thread of the warp and half within it that hold the four elements along the depth.

    Args:
        lane: thread that wants them.
        place: row of A or column of B.
        whole: every thread has a whole row of A, or column of B, rather than one element of four of them.
    """
    threads = _quad_pair_threads(lane)
    depth = np.arange(_DEPTH)
    if whole:
        owner = np.take_along_axis(threads, place[..., None], -1)
        return np.broadcast_to(owner, (*place.shape, _DEPTH)), np.broadcast_to(depth, (*place.shape, _DEPTH))
    owners = np.take_along_axis(threads, place[..., None] // 4 * 4 + depth, -1)
    return owners, np.broadcast_to(place[..., None] % 4, owners.shape)


@cache
def _fragment_places(step: int, *, of_rows: bool, whole: bool) -> Array:
    """``[depth, 2, 32]`` into the halves ``[32 * 4]`` of a warp, for both accumulators of a step."""
    lane = np.arange(WARP)
    found = []
    for index in (2 * step, 2 * step + 1):
        row, column = accumulator_place(lane, index)
        owner, half = fragment_source(lane, row if of_rows else column, whole=whole)
        found.append((owner * 4 + half).T)
    return np.stack(found, 1)


def hmma(instruction: Instruction, operands: Operands) -> Operation:
    """Two accumulators per thread: ``d = a * b + c``."""
    allow(instruction, "884", "F32", "STEP0", "STEP1", "STEP2", "STEP3")
    if instruction.modifiers[:3] != ("884", "F32", "F32"):
        raise Unsupported("products other than HMMA.884.F32.F32")
    d, a, b, c = instruction.operands
    assert all(isinstance(operand, Register) for operand in (d, a, b, c))
    assert isinstance(d, Register) and isinstance(a, Register) and isinstance(b, Register)
    assert isinstance(c, Register)
    step = int(instruction.modifiers[-1].removeprefix("STEP"))
    threads = operands.threads
    layouts = {operand.selector for operand in (a, b)}
    if not layouts <= {"ROW", "COL"}:
        raise Unsupported(f"layouts {sorted(layouts)}")
    sources = (
        (a.number, _fragment_places(step, of_rows=True, whole=a.selector == "ROW")),
        (b.number, _fragment_places(step, of_rows=False, whole=b.selector == "COL")),
    )
    writes = [operands.to_register(d, index) for index in range(2)]
    accumulators = [
        threads.registers[min(c.number + index, ZERO_REGISTER)].view(np.float32) for index in range(2)
    ]

    def fragments(number: int, places: Array) -> Array:
        """``[warps, depth, 2, 32]`` float64."""
        both = np.stack([threads.registers[number], threads.registers[number + 1]], 1)
        halves = both.view(np.float16).astype(np.float64).reshape(-1, WARP * 4)
        return np.take(halves, places, 1)

    def run(mask: Mask) -> None:
        products = fragments(*sources[0]) * fragments(*sources[1])
        sums = products[:, 0] + products[:, 1] + products[:, 2] + products[:, 3]
        for index, write in enumerate(writes):
            total = sums[:, index].reshape(-1) + accumulators[index]
            write(canonical(total.astype(np.float32)), mask)

    def spread(mask: Mask) -> None:
        """An undefined element makes what its row or column goes into undefined."""
        undefined = threads.undefined
        found: Any = np.zeros((threads.count // WARP, 2, WARP), bool)
        for number, places in sources:
            both = undefined.bits[number : number + 2] != 0  # a register's halves count together
            halves = np.repeat(both.T, 2, 1).reshape(-1, WARP * 4)
            found |= np.asarray(np.take(halves, places, 1).any(1))
        for index in range(2):
            marks = found[:, index].reshape(-1)
            if c.number != ZERO_REGISTER:
                marks = marks | (undefined.bits[c.number + index] != 0)
            undefined.set(d.number + index, marks * ALL_BITS, mask)

    read = [(number + further, ALL_BITS) for number, _ in sources for further in range(2)]
    if c.number != ZERO_REGISTER:
        read += [(c.number + further, ALL_BITS) for further in range(2)]
    return Operation(run, tuple(read), (d.number, d.number + 1), spread)


MATRIX: dict[str, Builder] = {"HMMA": hmma}
