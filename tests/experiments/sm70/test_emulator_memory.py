from __future__ import annotations

import re

import numpy as np
import pytest

from page4.experiments.sm70.emulator import Buffer, EmulationError, Run, run
from page4.kernels.errors import InputError

from .small_programs import WARP, Array, program

THREAD = """
    S2R R0, SR_TID.X
    MOV R4, 0x4
    IMAD.WIDE R2, R0, R4, c[0x0][0x160]
    IMAD.WIDE R6, R0, R4, c[0x0][0x168]
"""


def launch(body: str, *arguments: Array | Buffer, warps: int = 1, shared: int = 1024, blocks: int = 1) -> Run:
    return run(
        program(THREAD + body + "\nEXIT"),
        grid=(blocks, 1, 1),
        warps=warps,
        arguments=arguments,
        shared_bytes=shared,
    )


def test_widths_of_loads_and_stores() -> None:
    source = np.arange(WARP * 16, dtype=np.uint8)
    result = np.zeros(WARP * 16 + 48, np.uint8)
    launch(
        """
        MOV R5, 0x10
        IMAD.WIDE.U32 R2, R0, R5, c[0x0][0x160]
        SHF.L.U32 R5, R0, 0x4, RZ
        IADD3 R6, P0, R5, c[0x0][0x168], RZ
        IMAD.X R7, RZ, RZ, c[0x0][0x16c], P0
        LDG.E.U8.SYS R8, [R2+0x1]
        LDG.E.S8.SYS R9, [R2+0x2]
        LDG.E.U16.SYS R10, [R2+0x4]
        LDG.E.64.SYS R12, [R2+0x8]
        STG.E.U8.SYS [R6], R8
        STG.E.U16.SYS [R6+0x2], R10
        STG.E.SYS [R6+0x4], R9
        STG.E.64.SYS [R6+0x8], R12
        """,
        source,
        result,
    )
    rows, got = source.reshape(WARP, 16), result[: WARP * 16].reshape(WARP, 16)
    np.testing.assert_array_equal(got[:, 0], rows[:, 1])
    np.testing.assert_array_equal(got[:, 2:4], rows[:, 4:6])
    signed = np.ascontiguousarray(got[:, 4:8]).view(np.int32)[:, 0]
    np.testing.assert_array_equal(signed, rows[:, 2].view(np.int8))
    np.testing.assert_array_equal(got[:, 8:], rows[:, 8:])
    assert not result[WARP * 16 :].any()


def test_shared_and_local_memory_keep_what_is_stored() -> None:
    source, result = np.arange(2 * WARP, dtype=np.uint32) * 3, np.zeros(2 * WARP, np.uint32)
    found = launch(
        """
        MOV R1, c[0x0][0x28]
        IADD3 R1, R1, -0x10, RZ
        LDG.E.SYS R8, [R2]
        STL [R1+0x8], R8
        SHF.L.U32 R5, R0, 0x2, RZ
        LDL R9, [R1+0x8]
        STS [R5+0x10], R9
        BAR.SYNC 0x0
        LOP3.LUT R5, R5, 0xfc, RZ, 0x3c, !PT
        LDS.U R10, [R5+0x10]
        STG.E.SYS [R6], R10
        """,
        source, result, warps=2,
    )  # fmt: skip
    np.testing.assert_array_equal(result, source[::-1])
    assert found.races == []
    assert found.warp_instructions == 2 * 16


def test_blocks_have_places_and_shared_memory_of_their_own() -> None:
    result = np.zeros((6, 3), np.uint32)
    text = """
        S2R R4, SR_CTAID.X
        S2R R5, SR_CTAID.Y
        S2R R6, SR_CTAID.Z
        IMAD R7, R5, c[0x0][0xc], R4
        STS [RZ], R7
        LDS.U R8, [RZ]
        MOV R9, 0xc
        IMAD.WIDE R2, R8, R9, c[0x0][0x160]
        STG.E.SYS [R2], R4
        STG.E.SYS [R2+0x4], R5
        STG.E.SYS [R2+0x8], R6
        EXIT
    """
    chosen = [(x, y, 0) for x in range(3) for y in range(2)][1:]
    run(program(text), grid=(3, 2, 1), warps=1, arguments=[result], shared_bytes=4, blocks=chosen)
    np.testing.assert_array_equal(result[1:], [(1, 0, 0), (2, 0, 0), (0, 1, 0), (1, 1, 0), (2, 1, 0)])
    assert not result[0].any()  # block (0, 0, 0) did not run


def test_blocks_run_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("page4.experiments.sm70.emulator.launch._THREADS_AT_ONCE", 64)
    result = np.zeros(7, np.uint32)
    text = """
        S2R R4, SR_CTAID.X
        STS [RZ], R4
        LDS.U R8, [RZ]
        MOV R9, 0x4
        IMAD.WIDE R2, R8, R9, c[0x0][0x160]
        STG.E.SYS [R2], R8
        EXIT
    """
    found = run(
        program(text), grid=(7, 1, 1), warps=1, arguments=[result], shared_bytes=4, trace=True
    )  # fmt: skip
    np.testing.assert_array_equal(result, np.arange(7))
    assert found.trace is not None and found.warp_instructions == found.trace.events == 49
    assert found.trace.blocks[:, 0].tolist() == list(range(7))
    late = text.replace("STS [RZ], R4", "ISETP.LT.AND P0, PT, R4, 0x4, PT\n@P0 STS [RZ], R4")
    with pytest.raises(EmulationError, match=r"block \(4, 0, 0\), thread 0: the address depends"):
        run(program(late), grid=(7, 1, 1), warps=1, arguments=[result], shared_bytes=4)


def test_atomic_operations_take_turns() -> None:
    counter, order = np.zeros(1, np.uint32), np.zeros(2 * WARP, np.uint32)
    launch(
        """
        MOV R8, c[0x0][0x160]
        MOV R9, c[0x0][0x164]
        MOV R5, 0x2
        ATOMG.E.ADD.STRONG.GPU PT, R10, [R8], R5
        STG.E.SYS [R6], R10
        """,
        counter, order, warps=2,
    )  # fmt: skip
    assert counter[0] == 128 and sorted(order) == list(range(0, 128, 2))
    bits = np.zeros(1, np.uint32)
    launch(
        """
        MOV R5, 0x1
        SHF.L.U32 R5, R5, R0, RZ
        MOV R8, c[0x0][0x160]
        MOV R9, c[0x0][0x164]
        RED.E.OR.STRONG.GPU [R8], R5
        """,
        bits, order,
    )  # fmt: skip
    assert bits[0] == 0xFFFFFFFF


WORDS, MORE = np.zeros(WARP, np.uint32), np.zeros(WARP, np.uint32)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("LDG.E.SYS R8, [R2+0x4]",
         "LDG.E.SYS R8, [R2+0x4] at 0x40, block (0, 0, 0), thread 31: bytes 128 to 131 of array 0 "
         "(counted from 0), which has 128"),
        ("LDG.E.SYS R8, [R2+-0x4]", "thread 0: global address 0xfffffffffc belongs to no array"),
        ("ISETP.LT.AND P0, PT, R0, 0x8, PT\n@P0 STG.E.64.SYS [R6], R2",
         "thread 1: global address 0x20000000004 is not a multiple of 8"),
        ("STG.E.64.SYS [R6+0x4], R2", "thread 30: bytes 124 to 131 of array 1"),
        ("LDG.E.SYS R8, [RZ]", "global address 0x0 belongs to no array"),
        ("STS [R0+0x3e4], R0", "thread 25: shared address 0x3fd + 4 is behind the end, 0x400"),
        ("STS [R0], R0", "thread 1: shared address 0x1 is not a multiple of 4"),
        ("LDL R8, [RZ+0x7000]", "local address 0x7000, of 0x4000"),
        ("LDG.E.SYS R8, [R10]", "thread 0: the address depends on an undefined value in R10"),
        ("STG.E.SYS [R2], R10", "thread 0: stores an undefined value from R10 in global memory"),
        ("LDS.U R8, [R4]\nSTG.E.SYS [R2], R8", "stores an undefined value from R8"),
        ("LDL R8, [RZ]\nIADD3 R8, R8, 0x1, RZ\nSTG.E.SYS [R2], R8", "stores an undefined value from R8"),
        ("ISETP.LT.AND P1, PT, R0, R9, PT\n@P1 MOV R8, 0x1", "P1 depends on an undefined value"),
        ("ISETP.LT.AND P0, PT, R0, 0x3, PT\n@P0 MOV R8, 0x1\nSTG.E.SYS [R2], R8",
         "thread 3: stores an undefined value from R8"),
        ("ISETP.LT.AND P0, PT, R0, 0x8, PT\n@P0 SHFL.BFLY PT, R8, R0, 0x8, 0x1f\n@P0 STG.E.SYS [R2], R8",
         "thread 0: stores an undefined value from R8"),
    ],
)  # fmt: skip
def test_wrong_accesses_are_found(body: str, message: str) -> None:
    with pytest.raises(EmulationError, match=re.escape(message)):
        launch(body, WORDS, MORE)


@pytest.mark.parametrize(
    "body",
    [
        "LOP3.LUT R8, R9, RZ, RZ, 0xc0, !PT\nSTG.E.SYS [R2], R8",  # undefined & 0
        "LOP3.LUT R8, R9, 0xff, RZ, 0xfc, !PT\nSTG.E.U8.SYS [R2], R8",  # undefined | 0xff
        "PRMT R9, R0, 0x7610, R9\nSTG.E.U16.SYS [R2], R9",  # the lower half of R9 is defined now
        "PRMT R9, R0, 0x7610, R9\nIMAD.SHL.U32 R9, R9, 0x10000, RZ\nSTG.E.SYS [R2], R9",
        "ISETP.LT.AND P0, PT, R0, 0x3, PT\n@P0 MOV R8, 0x1\n@P0 STG.E.SYS [R2], R8",
        "ISETP.LT.AND P0, PT, R0, 0x3, PT\nSEL R8, R0, R0, P0\nSTG.E.SYS [R2], R8",
        "@!PT LDG.E.SYS R8, [R10]",
        "LDS.U R8, [R4]\nSTS [R4], R8",  # copies what nobody wrote, as compilers do
    ],
)  # fmt: skip
def test_undefined_values_that_decide_nothing_are_no_error(body: str) -> None:
    launch(body, WORDS.copy(), MORE.copy())


def test_memory_that_nobody_wrote() -> None:
    output = np.zeros(WARP, np.uint32)
    launch(
        "STG.E.SYS [R2], R0\nLDG.E.SYS R8, [R2]\nSTG.E.SYS [R6], R8",
        Buffer(output, written=False),
        MORE.copy(),
    )
    np.testing.assert_array_equal(output, np.arange(WARP))
    with pytest.raises(EmulationError, match="stores an undefined value from R8"):
        launch("LDG.E.SYS R8, [R2]\nSTG.E.SYS [R6], R8", Buffer(output, written=False), MORE.copy())


def test_addresses_may_point_into_an_array() -> None:
    data = np.arange(2 * WARP, dtype=np.uint32)
    result = np.zeros(WARP, np.uint32)
    launch("LDG.E.SYS R8, [R2+-0x4]\nSTG.E.SYS [R6], R8", Buffer(data, offset=4 * WARP), result)
    np.testing.assert_array_equal(result, np.arange(WARP) + WARP - 1)


def test_arguments_that_cannot_be_passed() -> None:
    with pytest.raises(InputError, match="contiguous"):
        launch("NOP", np.zeros((4, 4), np.uint32)[:, 0], MORE)
    with pytest.raises(InputError, match="at least one block"):
        launch("NOP", WORDS, MORE, blocks=0)
