from __future__ import annotations

import pytest

from page4.experiments.sm70.predictor.pipes import ISSUE_CYCLES, Kind, Pipe, kind_of, pipe_of


@pytest.mark.parametrize(
    ("opcode", "pipe", "kind"),
    [
        ("FFMA", Pipe.FMA, Kind.PLAIN),
        ("IMAD", Pipe.FMA, Kind.PLAIN),
        ("LOP3", Pipe.ALU, Kind.PLAIN),
        ("HFMA2", Pipe.FP16, Kind.PLAIN),
        ("MUFU", Pipe.SPECIAL, Kind.PLAIN),
        ("HMMA", Pipe.TENSOR, Kind.PLAIN),
        ("LDG", Pipe.LSU, Kind.GLOBAL_LOAD),
        ("LDL", Pipe.LSU, Kind.GLOBAL_LOAD),
        ("STG", Pipe.LSU, Kind.GLOBAL_STORE),
        ("LDS", Pipe.LSU, Kind.SHARED),
        ("SHFL", Pipe.LSU, Kind.SHARED),
        ("BAR", Pipe.CONTROL, Kind.BARRIER),
        ("BRA", Pipe.CONTROL, Kind.BRANCH),
        ("S2R", Pipe.CONTROL, Kind.SYSTEM),
    ],
)
def test_where_instructions_go(opcode: str, pipe: Pipe, kind: Kind) -> None:
    assert (pipe_of(opcode), kind_of(opcode)) == (pipe, kind)


def test_throughput_is_that_of_the_programming_guide() -> None:
    # Lanes a cycle on a multiprocessor with four schedulers.
    lanes = {pipe: 4 * 32 // ISSUE_CYCLES[pipe] for pipe in Pipe}
    assert lanes[Pipe.FMA] == lanes[Pipe.ALU] == lanes[Pipe.FP16] == 64
    assert lanes[Pipe.SPECIAL] == 16
    # A step of HMMA.884 is 256 multiply-adds.
    assert 4 * 256 // ISSUE_CYCLES[Pipe.TENSOR] == 512
