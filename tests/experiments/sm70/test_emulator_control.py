from __future__ import annotations

import numpy as np
import pytest

from page4.experiments.sm70.emulator import EmulationError, run

from .small_programs import WARP, outputs, program, words

LANE = np.arange(WARP)


def test_predicates_guard_instructions() -> None:
    (got,) = outputs(
        "ISETP.LT.AND P0, PT, R0, 0x5, PT\nMOV R40, 0x1\n@P0 MOV R40, 0x2\n@!P0 IADD3 R40, R40, 0x9, RZ"
    )
    np.testing.assert_array_equal(got, np.where(LANE < 5, 2, 10))


def test_threads_part_and_meet_again() -> None:
    """The sides of a branch run one after the other, and the vote behind it sees all threads."""
    (got, everyone, odd) = outputs(
        """
        LOP3.LUT R5, R0, 0x1, RZ, 0xc0, !PT
        ISETP.EQ.AND P0, PT, R5, RZ, PT
        MOV R42, RZ
        BSSY B0, `(after)
        @P0 BRA `(even)
        VOTE.ANY R42, PT, PT
        IMAD R40, R0, 0x3, RZ
        BRA `(together)
        even:
        MOV R40, 0x64
        together:
        BSYNC B0
        after:
        VOTE.ANY R41, PT, PT
        """,
        count=3,
    )
    np.testing.assert_array_equal(got, np.where(LANE % 2 == 0, 100, 3 * LANE))
    assert (everyone == 0xFFFFFFFF).all()
    np.testing.assert_array_equal(odd, np.where(LANE % 2 == 0, 0, 0xAAAAAAAA))


def test_loops_of_different_lengths() -> None:
    (got,) = outputs(
        """
        MOV R40, RZ
        MOV R5, RZ
        BSSY B1, `(after)
        again:
        IADD3 R40, R40, R5, RZ
        IADD3 R5, R5, 0x1, RZ
        ISETP.LE.AND P0, PT, R5, R0, PT
        @P0 BRA `(again)
        BSYNC B1
        after:
        SHFL.IDX PT, R40, R40, 0x1f, 0x1f
        """
    )
    assert (got == 31 * 32 // 2).all()


def test_subroutines_return_to_their_callers() -> None:
    (got,) = outputs(
        """
        ISETP.GE.AND P0, PT, R0, 0x8, PT
        BSSY B0, `(after)
        MOV R7, 0x0
        @P0 BRA `(other)
        MOV R6, 0xa0
        CALL.REL.NOINC `(twice)
        NOP
        NOP
        IADD3 R40, R8, 0x1, RZ
        BRA `(together)
        other:
        MOV R6, 0xe0
        CALL.REL.NOINC `(twice)
        IADD3 R40, R8, 0x2, RZ
        together:
        BSYNC B0
        BRA `(after)
        twice:
        IADD3 R8, R0, R0, RZ
        RET.REL.NODEC R6 `(start)
        after:
        NOP
        """
    )
    np.testing.assert_array_equal(got, np.where(LANE >= 8, 2 * LANE + 2, 2 * LANE + 1))


def test_branches_on_divergence() -> None:
    (got,) = outputs(
        """
        MOV R40, RZ
        ISETP.LT.AND P0, PT, R0, 0x4, PT
        BRA.DIV `(wrong)
        BRA.CONV `(right)
        wrong:
        MOV R40, 0x63
        right:
        BSSY B0, `(after)
        @!P0 BRA `(together)
        BRA.CONV `(together)
        BRA.DIV `(parted)
        BRA `(together)
        parted:
        IADD3 R40, R40, 0x1, RZ
        together:
        BSYNC B0
        after:
        NOP
        """
    )
    np.testing.assert_array_equal(got, LANE < 4)


def test_threads_that_exit_are_not_waited_for() -> None:
    result = np.zeros(2 * WARP, np.uint32)
    text = """
        S2R R0, SR_TID.X
        ISETP.LT.AND P0, PT, R0, 0x28, PT
        @P0 EXIT
        BAR.SYNC 0x0
        MOV R4, 0x4
        IMAD.WIDE R2, R0, R4, c[0x0][0x160]
        STG.E.SYS [R2], R0
        EXIT
    """
    run(program(text), grid=(1, 1, 1), warps=2, arguments=[result], shared_bytes=0)
    np.testing.assert_array_equal(result, np.where(np.arange(64) < 40, 0, np.arange(64)))


def test_exit_may_ask_for_two_predicates() -> None:
    result = np.zeros(WARP, np.uint32)
    text = """
        S2R R0, SR_TID.X
        ISETP.LT.AND P0, PT, R0, 0x10, PT
        ISETP.GT.AND P1, PT, R0, 0x14, PT
        @!P0 EXIT P1
        MOV R4, 0x4
        IMAD.WIDE R2, R0, R4, c[0x0][0x160]
        STG.E.SYS [R2], R0
        EXIT
    """
    run(program(text), grid=(1, 1, 1), warps=1, arguments=[result], shared_bytes=0)
    np.testing.assert_array_equal(result, np.where(LANE <= 0x14, LANE, 0))


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SHFL.BFLY PT, R40, R20, 0x3, 0x1f", LANE ^ 3),
        ("SHFL.UP PT, R40, R20, 0x5, RZ", np.where(LANE >= 5, LANE - 5, LANE)),
        ("SHFL.DOWN PT, R40, R20, 0x5, 0x1f", np.where(LANE + 5 < 32, LANE + 5, LANE)),
        ("SHFL.IDX PT, R40, R20, R21, 0x1f", LANE * 7 % 32),
        ("SHFL.DOWN PT, R40, R20, 0x1, 0x181f", np.where(LANE % 8 < 7, LANE + 1, LANE)),
        ("SHFL.UP P0, R41, R20, 0x5, RZ\nSEL R40, RZ, 0x1, P0", LANE < 5),
    ],
)
def test_shuffles(statement: str, expected: np.ndarray) -> None:
    (got,) = outputs(statement, words(LANE), words(LANE * 7))
    np.testing.assert_array_equal(got, expected)


def test_votes_and_lane_masks() -> None:
    mask, every, below = outputs(
        """
        ISETP.GT.AND P0, PT, R0, 0x1d, PT
        VOTE.ANY R40, P1, P0
        VOTE.ALL P2, P0
        P2R R41, PR, RZ, 0x6
        S2R R42, SR_LTMASK
        """,
        count=3,
    )
    assert (mask == 0xC0000000).all() and (every == 0b010).all()
    np.testing.assert_array_equal(below, (1 << LANE) - 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("DMMA R2, R4, R6\nEXIT", r"DMMA R2, R4, R6 at 0x0: not known to the emulator: opcode"),
        ("FADD.XYZ R2, R4, R6\nEXIT", r"not known to the emulator: modifiers \['XYZ'\]"),
        ("S2R R2, SR_CLOCKLO\nEXIT", "special register SR_CLOCKLO"),
        ("MOV R2, c[0x0][0x170]\nEXIT", r"c\[0x0\]\[0x170\] lies behind the arguments, which end at 0x170"),
        ("MOV R2, 0x1", "ran past the last instruction"),
        ("here:\nBRA `(here)", "too many steps"),
        ("S2R R0, SR_TID.X\nISETP.EQ.AND P0, PT, R0, RZ, PT\nBSSY B0, `(x)\n@P0 BRA `(x)\nBSYNC B0\n"
         "x:\nBAR.SYNC 0x0\nBSYNC B0\nEXIT", "all threads wait for each other"),
        ("BAR.SYNC 0x1, 0x40\nEXIT", "barriers other than BAR.SYNC 0x0"),
    ],
)  # fmt: skip
def test_what_cannot_run(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("page4.experiments.sm70.emulator.launch._MOST_STEPS", 1000)
    with pytest.raises(EmulationError, match=message):
        run(program(text), grid=(1, 1, 1), warps=1, arguments=[], shared_bytes=0)
