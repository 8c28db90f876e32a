from __future__ import annotations

import pytest

from page4.experiments.sm70.assembly import parse
from page4.experiments.sm70.predictor.occupancy import Occupancy
from page4.experiments.sm70.predictor.pipes import Pipe
from page4.experiments.sm70.predictor.static_report import dram_floor_us, static_report
from tests.experiments.sm70.predictor.listings import listing

LOOPS = """
    S2R R0, SR_TID.X ;
.L_0:
    LDL R2, [R1] ;
.L_1:
    FFMA R3, R3, R3, R3 ;
    IADD3 R0, R0, 0x1, RZ ;
    @P0 BRA `(.L_1) ;
    STL [R1], R2 ;
    @P1 BRA `(.L_0) ;
    EXIT ;
.L_2:
    BRA `(.L_2) ;
    NOP ;
    NOP ;
"""


def test_instructions_count_once_by_pipe_without_the_padding() -> None:
    report = static_report(parse(LOOPS), 0, 4)
    assert report.instructions == {Pipe.CONTROL: 4, Pipe.LSU: 2, Pipe.FMA: 1, Pipe.ALU: 1}
    assert report.spills == 2
    assert report.hmma == 0


def test_only_innermost_loops_count_as_loops() -> None:
    report = static_report(parse(LOOPS), 0, 4)
    assert report.loop_instructions == {Pipe.FMA: 1, Pipe.ALU: 1, Pipe.CONTROL: 1}


def test_a_matrix_product_on_tensor_cores() -> None:
    report = static_report(listing("matmul_128_128_64_8_34816"), 34816, 8)
    assert report.hmma == report.loop_instructions[Pipe.TENSOR] == 512
    assert report.registers == 158
    assert report.spills == 0
    assert report.occupancy == Occupancy(1, 8, "registers")


def test_the_floor_is_that_of_streams() -> None:
    assert dram_floor_us(830_000) == pytest.approx(1.0)
