from __future__ import annotations

import numpy as np

from page4.experiments.sm70 import emulator
from page4.experiments.sm70.assembly import parse
from page4.experiments.sm70.predictor.lowering import lower_program, lower_trace
from page4.experiments.sm70.predictor.pipes import Kind, Pipe
from page4.experiments.sm70.trace import Trace

# Loads 16 bytes a thread and stores 4.
TEXT = """
    S2R R0, SR_TID.X ;
    MOV R2, 0x10 ;
    IMAD.WIDE.U32 R4, R0, R2, c[0x0][0x160] ;
    LDG.E.128.SYS R8, [R4] ;
    MOV R2, 0x80 ;
    IMAD.WIDE.U32 R4, R0, R2, c[0x0][0x168] ;
    STG.E.SYS [R4], R8 ;
    EXIT ;
"""
ENCODED = """
.text.k:
        /*0000*/                   LDG.E.128.SYS R8, [R4] ;        /* 0x0000000004087381 */
                                                                   /* 0x004ea400001eed00 */
        /*0010*/                   EXIT ;                          /* 0x000000000000794d */
                                                                   /* 0x003fea0003800000 */
"""


def trace_of(text: str, warps: int) -> Trace:
    source, target = np.zeros(4 * 32 * warps, np.uint32), np.zeros(32 * 32 * warps, np.uint32)
    run = emulator.run(
        parse(text), grid=(1, 1, 1), warps=warps, arguments=[source, target], shared_bytes=0, trace=True
    )
    assert run.trace is not None
    return run.trace


def test_lines_and_bytes_decide_how_long_global_memory_takes() -> None:
    program = parse(TEXT)
    lowered = lower_trace(program, trace_of(TEXT, 2))
    assert lowered.warp_start.tolist() == [0, 8, 16]
    wavefronts = lowered.events["wavefronts"][:8].tolist()
    # 512 bytes in 4 lines; a line for every thread; everything else takes the unit for a cycle.
    assert wavefronts == [1, 1, 1, 4, 1, 1, 32, 1]
    load = slice(lowered.events["first_sector"][3], lowered.events["first_sector"][4])
    assert len(lowered.sectors[load]) == 16
    assert (np.diff(lowered.sectors[load]["address"]) == 1).all()


def test_the_last_event_ends_the_sectors() -> None:
    lowered = lower_trace(parse(TEXT), trace_of(TEXT, 1))
    assert len(lowered.events) == 9
    assert lowered.events["first_sector"][-1] == len(lowered.sectors) == 16 + 32


def test_control_codes_are_taken_over() -> None:
    load, leave = lower_program(parse(ENCODED))
    control = parse(ENCODED).instructions[0].control
    assert (load["pipe"], load["kind"]) == (Pipe.LSU, Kind.GLOBAL_LOAD)
    assert load["stall"] == control.stall
    assert load["wait_mask"] == control.wait_mask
    assert load["write_barrier"] == control.write_barrier
    assert load["read_barrier"] == 7
    assert load["keeps"] == (not control.yields)
    assert leave["write_barrier"] == leave["read_barrier"] == 7
