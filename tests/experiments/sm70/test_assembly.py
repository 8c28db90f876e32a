from __future__ import annotations

import pytest

from page4.experiments.sm70.assembly import (
    NO_CONTROL,
    TRUE_PREDICATE,
    ZERO_REGISTER,
    Address,
    Constant,
    ControlCode,
    Immediate,
    Operand,
    Predicate,
    Register,
    Special,
    Target,
    parse,
)
from page4.kernels.errors import InputError

TEXT = """
\t.headerflags\t@"EF_CUDA_SM70"
\t.section\t.text.add_one,"ax",@progbits
\t.sectioninfo\t@"SHI_REGISTERS=12"
\t.align\t128
        .global         add_one
add_one:
.text.add_one:
        /*0000*/                   S2R R0, SR_TID.X ;             /* 0x0000000000007919 */
                                                                  /* 0x000e240000002100 */
.L_x_0:
        /*0010*/              @!P1 LDG.E.64.SYS R8, [R14+-0x10] ; /* 0x000010000e047381 */
                                                                  /* 0x00016200001eed00 */
        /*0020*/                   BRA `(.L_x_0) ;                /* 0x0000004000008947 */
                                                                  /* 0x002fea0003800000 */
.L_x_1:
"""


def operands(statement: str) -> tuple[Operand, ...]:
    return parse(f"here:\n{statement} ;").instructions[0].operands


def test_a_kernel_is_read_with_its_name_registers_and_addresses() -> None:
    program = parse(TEXT)
    assert (program.name, program.registers, len(program.instructions)) == ("add_one", 12, 3)
    _, load, _ = program.instructions
    assert (load.index, load.address, load.opcode) == (1, 0x10, "LDG")
    assert load.modifiers == ("E", "64", "SYS")
    assert load.predicate == Predicate(1, negate=True)
    assert load.operands == (Register(8), Address(14, -16))
    assert (load.memory_space, load.access_bytes) == ("global", 8)
    assert program.loops == ((1, 2),)


def test_control_codes_come_from_the_encoding() -> None:
    first, load, jump = (instruction.control for instruction in parse(TEXT).instructions)
    assert first == ControlCode(2, False, 0, None, 0, 0)
    assert load == ControlCode(1, False, 5, 0, 0, 0)
    assert jump == ControlCode(5, False, None, None, 2, 0)


def test_lines_without_encoding_have_no_control() -> None:
    (instruction,) = parse("NOP ;").instructions
    assert instruction.control == NO_CONTROL
    assert instruction.predicate == Predicate(TRUE_PREDICATE)
    assert not instruction.memory_space and not instruction.access_bytes


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("MOV R1, c[0x0][0x28]", (Register(1), Constant(0, 0x28))),
        ("FADD R1, -R2.reuse, |R3|", (Register(1), Register(2, negate=True), Register(3, absolute=True))),
        ("FADD R1, -|R2|, -c[0x0][0x160]",
         (Register(1), Register(2, negate=True, absolute=True), Constant(0, 0x160, negate=True))),
        ("IADD3.X R1, RZ, ~R2, RZ, !P0, PT",
         (Register(1), Register(ZERO_REGISTER), Register(2, invert=True), Register(ZERO_REGISTER),
          Predicate(0, negate=True), Predicate(TRUE_PREDICATE))),
        ("FSEL R1, R2, +INF , P0", (Register(1), Register(2), Immediate(float("inf")), Predicate(0))),
        ("FMUL R1, R2, -1.5e-07", (Register(1), Register(2), Immediate(-1.5e-07))),
        ("MOV R1, -0x1", (Register(1), Immediate(-1))),
        ("HADD2.F32 R1, -RZ, R4.H1_H1",
         (Register(1), Register(ZERO_REGISTER, negate=True), Register(4, selector="H1_H1"))),
        ("HMMA.884.F32.F32.STEP0 R4, R16.reuse.ROW, R2.COL, R4",
         (Register(4), Register(16, selector="ROW"), Register(2, selector="COL"), Register(4))),
        ("STS [R3.X4+0x10], RZ", None),
        ("STS [0x40], RZ", (Address(ZERO_REGISTER, 0x40), Register(ZERO_REGISTER))),
        ("LDS.U.64 R2, [R3]", (Register(2), Address(3, 0))),
        ("S2R R0, SR_TID.X", (Register(0), Special("SR_TID.X"))),
        ("BSSY B0, `(here)", (Special("B0"), Target(0))),
        ("RET.REL.NODEC R14 `(here)", (Register(14), Target(0))),
    ],
)  # fmt: skip
def test_operands(statement: str, expected: tuple[Operand, ...] | None) -> None:
    if expected is None:
        with pytest.raises(InputError, match="cannot read the instruction at 0x0"):
            operands(statement)
    else:
        assert operands(statement) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no instructions"),
        ("BRA `(nowhere) ;", "no label nowhere"),
        ("what is this", "cannot read this line"),
        ("mov r1, r2 ;", "cannot read the instruction at 0x0"),
        (TEXT + TEXT.replace("add_one", "other"), "code of add_one and of another kernel"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(text)
