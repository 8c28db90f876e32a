"""Machine code of small Triton kernels on the emulator: as compiled, and with faults put in."""

from __future__ import annotations

import math

import numpy as np
import pytest

from page4.experiments.sm70.assembly import Program, parse
from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.emulator import Buffer, EmulationError, Race, Run, run, unknown_instructions

from .small_kernels import JOBS, SHARED_BYTES, fixture, fixture_text, machine_code
from .small_programs import Array

RNG = np.random.default_rng(0)


def row_sums(program: Program, x: Array, rows: int) -> tuple[Array, Run]:
    sums = np.full(rows, np.nan, np.float32)
    found = run(
        program, grid=(rows, 1, 1), warps=4, arguments=[x, Buffer(sums, written=False), x.shape[1]],
        shared_bytes=SHARED_BYTES["row_sums"],
    )  # fmt: skip
    return sums, found


def reverse(program: Program) -> tuple[Array, Array, list[Race]]:
    x, out = RNG.permutation(256).astype(np.int32), np.zeros(256, np.int32)
    found = run(
        program, grid=(1, 1, 1), warps=2, arguments=[x, Buffer(out, written=False)],
        shared_bytes=SHARED_BYTES["reversed_rows"],
    )  # fmt: skip
    return out, x[::-1], found.races


@pytest.mark.parametrize("columns", [1, 5, 123, 256])
def test_sums_of_rows(columns: int) -> None:
    x = RNG.standard_normal((9, columns)).astype(np.float32)
    sums, found = row_sums(fixture("row_sums"), x, 9)
    np.testing.assert_allclose(sums, x.sum(1, dtype=np.float64), rtol=1e-5, atol=1e-5)
    assert found.races == []


def test_scaled_halves() -> None:
    x = np.array([*RNG.standard_normal(300), math.inf, -0.0, 6e-8], np.float16)
    out = np.zeros(303, np.float32)
    run(
        fixture("scaled"), grid=(2, 1, 1), warps=4, arguments=[x, Buffer(out, written=False), 0.3, 303],
        shared_bytes=0,
    )  # fmt: skip
    np.testing.assert_array_equal(out, x.astype(np.float32) * np.float32(0.3))


def test_reversal_through_shared_memory() -> None:
    out, expected, races = reverse(fixture("reversed_rows"))
    np.testing.assert_array_equal(out, expected)
    assert races == []


def without_barrier(name: str, number: int) -> Program:
    """A kernel with one of its barriers left out."""
    parts = fixture_text(name).split("BAR.SYNC 0x0")
    assert 0 <= number < len(parts) - 1
    return parse("BAR.SYNC 0x0".join(parts[: number + 1]) + "NOP" + "BAR.SYNC 0x0".join(parts[number + 1 :]))


def test_a_barrier_that_is_missing_in_a_sum() -> None:
    x = RNG.standard_normal((2, 256)).astype(np.float32)
    _, found = row_sums(without_barrier("row_sums", 0), x, 2)
    assert [(race.kind, race.instruction.opcode) for race in found.races] == [("read after write", "LDS")]
    # Behind the second one, only the thread that wrote the sum goes on and reads it.
    sums, found = row_sums(without_barrier("row_sums", 1), x, 2)
    np.testing.assert_allclose(sums, x.sum(1), rtol=1e-5, atol=1e-5)
    assert found.races == []


def test_a_barrier_that_is_missing_between_a_store_and_a_load() -> None:
    _, _, races = reverse(without_barrier("reversed_rows", 0))
    assert [(race.kind, race.instruction.opcode) for race in races] == [("read after write", "LDS")]


def test_an_array_that_is_too_short() -> None:
    x = np.zeros(9 * 123 - 1, np.float32)
    with pytest.raises(EmulationError, match=r"LDG.*block \(8, 0, 0\).* of array 0 .*, which has 4424"):
        run(
            fixture("row_sums"), grid=(9, 1, 1), warps=4,
            arguments=[x, np.zeros(9, np.float32), 123], shared_bytes=16,
        )  # fmt: skip


def test_too_little_shared_memory() -> None:
    with pytest.raises(EmulationError, match=r"shared address .* is behind the end, 0x8"):
        run(
            fixture("row_sums"), grid=(1, 1, 1), warps=4,
            arguments=[np.zeros(8, np.float32), np.zeros(1, np.float32), 8], shared_bytes=8,
        )  # fmt: skip


def test_an_input_that_nobody_wrote() -> None:
    x = Buffer(np.zeros(256, np.float32), written=False)
    with pytest.raises(EmulationError, match="stores an undefined value"):
        run(
            fixture("row_sums"), grid=(1, 1, 1), warps=4, arguments=[x, np.zeros(1, np.float32), 256],
            shared_bytes=16,
        )  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_fixtures_are_what_the_side_install_compiles(name: str, compiler: Compiler) -> None:
    assert machine_code(compiler, name) == (fixture_text(name), SHARED_BYTES[name])


@pytest.mark.parametrize("name", JOBS)
def test_every_instruction_is_known(name: str) -> None:
    assert unknown_instructions(fixture(name)) == []


def test_unknown_instructions_are_listed() -> None:
    text = "DMMA R2, R4, R6 ;\nNOP ;\n@P0 FADD.XYZ R1, R1, R1 ;\nBAR.ARV 0x1 ;"
    found = unknown_instructions(parse(text))
    assert [line.split(" at ")[0] for line in found] == [
        "DMMA R2, R4, R6", "@P0 FADD.XYZ R1, R1, R1", "BAR.ARV 0x1",
    ]  # fmt: skip
