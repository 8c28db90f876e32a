"""A kernel in which two warps exchange words through shared memory, with each of its barriers left out."""

from __future__ import annotations

import numpy as np
import pytest

from page4.experiments.sm70.emulator import Run, run

from .small_programs import WARP, program

EXCHANGE = """
    S2R R0, SR_TID.X
    MOV R4, 0x4
    IMAD.WIDE R2, R0, R4, c[0x0][0x160]
    SHF.L.U32 R5, R0, 0x2, RZ
    LOP3.LUT R6, R5, 0xfc, RZ, 0x3c, !PT
    MOV R8, RZ
    again:
    IADD3 R9, R0, R8, RZ
    STS [R5], R9
    BAR.SYNC 0x0
    LDS.U R10, [R6]
    BAR.SYNC 0x0
    IADD3 R8, R8, 0x1, RZ
    ISETP.LT.AND P0, PT, R8, 0x2, PT
    @P0 BRA `(again)
    STG.E.SYS [R2], R10
    EXIT
"""


def exchange(text: str, warps: int = 2) -> Run:
    result = np.zeros(WARP * warps, np.uint32)
    return run(program(text), grid=(3, 1, 1), warps=warps, arguments=[result], shared_bytes=512)


def without(number: int) -> str:
    parts = EXCHANGE.split("BAR.SYNC 0x0")
    return "BAR.SYNC 0x0".join(parts[:number]) + "NOP" + "BAR.SYNC 0x0".join(parts[number:])


def test_with_its_barriers_there_is_no_race() -> None:
    assert exchange(EXCHANGE).races == []


@pytest.mark.parametrize(
    ("number", "kind", "opcode"), [(1, "read after write", "LDS"), (2, "write after read", "STS")]
)
def test_a_missing_barrier_is_found(number: int, kind: str, opcode: str) -> None:
    race = exchange(without(number)).races[0]
    assert (race.kind, race.instruction.opcode) == (kind, opcode)
    assert race.block == (0, 0, 0) and {race.warp, *race.other_warps} == {0, 1}
    assert race.address == (252 if opcode == "LDS" else 0)


def test_one_warp_needs_no_barrier() -> None:
    alone = EXCHANGE.replace("BAR.SYNC 0x0", "NOP").replace("0xfc", "0x7c")
    assert exchange(alone, warps=1).races == []
    assert exchange(alone, warps=2).races == []  # each warp keeps to its own words


def test_two_writers_of_one_word() -> None:
    both = """
        S2R R0, SR_TID.X
        LOP3.LUT R5, R0, 0x1f, RZ, 0xc0, !PT
        SHF.L.U32 R6, R5, 0x2, RZ
        STS [R6], {value}
        EXIT
    """
    race = exchange(both.format(value="R0")).races[0]
    assert (race.kind, race.warp, race.other_warps) == ("write after write", 0, (1,))
    assert exchange(both.format(value="R5")).races == []  # the same value twice


def test_writers_one_after_the_other() -> None:
    text = """
        S2R R0, SR_TID.X
        ISETP.LT.AND P0, PT, R0, 0x20, PT
        @P0 STS [RZ], RZ
        @!P0 STS [RZ], {value}
        EXIT
    """
    assert exchange(text.format(value="RZ")).races == []
    found = exchange(text.replace("@!P0 STS [RZ], {value}", "MOV R1, 0x1\n@!P0 STS [RZ], R1")).races
    assert [race.kind for race in found] == ["write after write"]


def test_bytes_of_one_word_may_belong_to_different_warps() -> None:
    text = """
        S2R R0, SR_TID.X
        SHF.R.U32.HI R5, RZ, 0x5, R0
        STS.U8 [R5], R5
        LDS.U.U8 R6, [R5{offset}]
        EXIT
    """
    assert exchange(text.format(offset="")).races == []
    text = text.replace("LDS.U.U8 R6, [R5{offset}]", "LOP3.LUT R5, R5, 0x1, RZ, 0x3c, !PT\nLDS.U.U8 R6, [R5]")
    assert [race.kind for race in exchange(text).races] == ["read after write"]


def test_a_barrier_of_one_block_frees_no_other() -> None:
    text = """
        S2R R0, SR_TID.X
        S2R R7, SR_CTAID.X
        SHF.L.U32 R5, R0, 0x2, RZ
        LOP3.LUT R6, R5, 0xfc, RZ, 0x3c, !PT
        STS [R5], R0
        ISETP.EQ.AND P0, PT, R7, 0x1, PT
        @P0 BRA `(read)
        BAR.SYNC 0x0
        read:
        LDS.U R10, [R6]
        EXIT
    """
    assert [race.block for race in exchange(text).races] == [(1, 0, 0)]
