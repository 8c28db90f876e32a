from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from page4.experiments.sm70.emulator import run
from page4.experiments.sm70.emulator.global_memory import RANGE_BYTES
from page4.experiments.sm70.emulator.recorder import wavefronts
from page4.experiments.sm70.trace import SECTOR_BYTES, Trace

from .small_programs import WARP, program

TEXT = """
    S2R R0, SR_TID.X
    S2R R7, SR_CTAID.X
    ISETP.LT.AND P0, PT, R0, 0x30, PT
    SHF.L.U32 R5, R0, 0x4, RZ
    IADD3 R2, P1, R5, c[0x0][0x160], RZ
    IMAD.X R3, RZ, RZ, c[0x0][0x164], P1
    @P0 LDG.E.128.SYS R8, [R2]
    STS.128 [R5], RZ
    BAR.SYNC 0x0
    @P0 BRA `(end)
    NOP
    end:
    EXIT
"""
LOAD, STORE = 6, 7


def traced(blocks: int = 3) -> Trace:
    data = np.zeros(64 * 16, np.uint8)
    found = run(
        program(TEXT), grid=(blocks, 1, 1), warps=2, arguments=[data], shared_bytes=1024, trace=True
    ).trace
    assert found is not None
    return found


def test_every_warp_has_its_instructions_in_order() -> None:
    trace = traced()
    assert trace.warps_per_block == 2
    assert trace.blocks.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    pieces = [trace.instructions[a:b].tolist() for a, b in pairwise(trace.warp_starts)]
    first = [*range(10), 11]  # all threads of warp 0 jump over the NOP
    assert pieces[::2] == [first] * 3
    assert [sorted(set(piece)) for piece in pieces[1::2]] == [list(range(12))] * 3  # half of warp 1 does not
    assert trace.events == sum(map(len, pieces)) and trace.counts(12)[LOAD] == 6


def test_sectors_and_lanes_of_loads() -> None:
    trace = traced()
    loads = np.flatnonzero(trace.instructions == LOAD)
    assert trace.lanes[loads].tolist() == [32, 16] * 3
    base = RANGE_BYTES // SECTOR_BYTES
    for event, sectors in zip(loads, [range(16), range(16, 24)] * 3, strict=True):
        got = trace.sectors[trace.sector_starts[event] : trace.sector_starts[event + 1]]
        assert (got - base).tolist() == list(sectors)
    assert np.diff(trace.sector_starts).sum() == len(trace.sectors) == 3 * 24
    assert (trace.wavefronts[trace.instructions == STORE] == 4).all()
    assert (trace.wavefronts[trace.instructions != STORE] == 0).all()


def test_local_memory_lies_apart_and_in_rows_of_a_warp() -> None:
    text = "MOV R1, 0x20\nSTL [R1], R1\nSTL.64 [R1+0x8], RZ\nEXIT"
    trace = run(
        program(text), grid=(2, 1, 1), warps=2, arguments=[], shared_bytes=0, trace=True
    ).trace  # fmt: skip
    assert trace is not None
    assert np.bincount(np.diff(trace.sector_starts)).tolist() == [8, 0, 0, 0, 4, 0, 0, 0, 4]
    assert len(np.unique(trace.sectors)) == len(
        trace.sectors
    )  # no thread shares a sector with another warp's


@pytest.mark.parametrize(
    ("addresses", "size", "passes"),
    [
        (np.arange(WARP) * 4, 4, 1),
        (np.zeros(WARP), 4, 1),  # one word for all
        (np.arange(WARP) * 8, 4, 2),
        (np.arange(WARP) * 128, 4, 32),
        (np.arange(WARP) * 8, 8, 2),
        (np.arange(WARP) * 16, 16, 4),
        (np.arange(WARP) * 32, 16, 8),
        (np.arange(WARP) % 4, 1, 1),
        (np.where(np.arange(WARP) < 2, np.arange(WARP) * 128, -1), 4, 2),
    ],
)
def test_bank_conflicts(addresses: np.ndarray, size: int, passes: int) -> None:
    rows = np.stack([addresses.astype(np.int64), np.full(WARP, -1)])
    assert wavefronts(rows, size).tolist() == [passes, 0]
