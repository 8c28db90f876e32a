"""Reads the text of NVIDIA's disassembler for compute capability 7.0 (``nvdisasm -c -hex``).

An instruction is ``@[!]predicate OPCODE.MODIFIERS operands``. Its 128-bit encoding, which ``-hex`` prints
beside it, also holds what the assembler decided about time: how many cycles to wait before the next
instruction, which of six scoreboards the instruction sets and waits for, whether another warp should go first
(Jia et al., "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018). Lines without an
encoding are read too, with :data:`NO_CONTROL`, so that tests can be written by hand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeAlias

from page4.kernels.errors import InputError

INSTRUCTION_BYTES = 16
ZERO_REGISTER = 255  # RZ: reads as 0, and what is written to it is lost
TRUE_PREDICATE = 7  # PT: always true


@dataclass(frozen=True)
class Register:
    """A 32-bit register, or the first one of a wider value.

    Attributes:
        number: 0 to 254; 255 is ``RZ``.
        negate, absolute, invert: the modifiers ``-``, ``|x|`` and ``~``, applied absolute value first.
        selector: ``H0_H0`` and ``H1_H1`` take one half twice; ``ROW`` and ``COL`` are layouts of ``HMMA``.
    """

    number: int
    negate: bool = False
    absolute: bool = False
    invert: bool = False
    selector: str = ""


@dataclass(frozen=True)
class Predicate:
    """A predicate register; 7 is ``PT``."""

    number: int
    negate: bool = False


@dataclass(frozen=True)
class Constant:
    """``c[bank][offset]``: bank 0 holds the launch's sizes and, from 0x160 on, the kernel's parameters."""

    bank: int
    offset: int
    register: int = ZERO_REGISTER
    negate: bool = False
    absolute: bool = False
    invert: bool = False
    selector: str = ""


@dataclass(frozen=True)
class Immediate:
    """A number in the instruction itself: an int where the text has one, else a float."""

    value: int | float


@dataclass(frozen=True)
class Address:
    """``[register+offset]``, with 32 or 64 bits of register as the instruction's ``.E`` says."""

    register: int
    offset: int


@dataclass(frozen=True)
class Target:
    """A place in the program, as the index of an instruction."""

    index: int


@dataclass(frozen=True)
class Special:
    """Anything else that has a name: ``SR_TID.X``, ``SRZ``, ``PR`` (all predicates), ``B0`` (convergence)."""

    name: str


Operand: TypeAlias = Register | Predicate | Constant | Immediate | Address | Target | Special


@dataclass(frozen=True)
class ControlCode:
    """What the assembler decided about time.

    Attributes:
        stall: cycles before the warp's next instruction may issue.
        yields: the scheduler should prefer another warp after this instruction.
        write_barrier: scoreboard 0 to 5 that is released when the result is written, or None.
        read_barrier: scoreboard that is released when the operands have been read, or None.
        wait_mask: bit i: wait for scoreboard i before issuing.
        reuse: bit i: keep operand i in the reuse cache.
    """

    stall: int
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    wait_mask: int
    reuse: int

    @classmethod
    def decode(cls, high: int) -> ControlCode:
        """The control code in the upper 64 bits of an encoding."""
        code = high >> 41
        write, read = code >> 5 & 7, code >> 8 & 7
        return cls(
            stall=code & 15,
            yields=not code >> 4 & 1,
            write_barrier=None if write == 7 else write,
            read_barrier=None if read == 7 else read,
            wait_mask=code >> 11 & 63,
            reuse=code >> 17 & 15,
        )


NO_CONTROL = ControlCode(1, False, None, None, 0, 0)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        index: its place in the program.
        address: bytes from the beginning of the kernel.
        opcode: the name in front of the first dot.
        modifiers: the names behind the dots.
        operands: destinations first, as printed.
        predicate: the instruction has an effect only where this holds.
        control: what the assembler decided about time.
        text: as printed, without the encoding.
    """

    index: int
    address: int
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Predicate
    control: ControlCode
    text: str

    @property
    def access_bytes(self) -> int:
        """Bytes per thread that the instruction loads or stores; 0 where it accesses no memory."""
        if self.opcode not in MEMORY_SPACES:
            return 0
        for modifier in self.modifiers:
            if modifier in _WIDTHS:
                return _WIDTHS[modifier]
        return 4

    @property
    def memory_space(self) -> str:
        """``global``, ``shared`` or ``local``; empty where the instruction accesses no memory."""
        return MEMORY_SPACES.get(self.opcode, "")


@dataclass(frozen=True)
class Program:
    """A kernel's instructions.

    Attributes:
        name: the kernel's name, empty where the text has none.
        registers: registers per thread that the binary asks for, 0 where the text does not say.
        instructions: in the order of their addresses.
    """

    name: str
    registers: int
    instructions: tuple[Instruction, ...]

    @property
    def loops(self) -> tuple[tuple[int, int], ...]:
        """Target and place of every branch backwards; that of the padding to itself is none."""
        return tuple(
            (operand.index, instruction.index)
            for instruction in self.instructions
            if instruction.opcode == "BRA"
            for operand in instruction.operands
            if isinstance(operand, Target) and operand.index < instruction.index
        )


MEMORY_SPACES = {
    "LDG": "global", "STG": "global", "ATOMG": "global", "RED": "global",
    "LDS": "shared", "STS": "shared", "ATOMS": "shared",
    "LDL": "local", "STL": "local",
}  # fmt: skip
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1}

_LINE = re.compile(r"(?:/\*([0-9a-f]{4,})\*/)?\s*(.*?)\s*;\s*(?:/\* 0x([0-9a-f]{16}) \*/)?$")
_SECOND_WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/$")
_LABEL = re.compile(r"([.$\w]+):$")
_STATEMENT = re.compile(r"(?:@(!?)P([0-6T])\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)(?:\s+(.*))?$")


def parse(text: str) -> Program:
    """Read a kernel.

    Raises:
        InputError: the text has no instructions, those of more than one kernel, or any that cannot be read.
    """
    name, registers = "", 0
    labels: dict[str, int] = {}
    found: list[tuple[int, str, int | None]] = []  # address, statement, upper half of the encoding
    in_code = ".section\t" not in text
    for line in text.splitlines():
        line = line.strip()
        if line.startswith(".section\t"):
            in_code = ".text." in line
            if in_code and found:
                raise InputError(f"code of {name} and of another kernel in one text; pass one of them")
            if in_code:
                name = line.split(".text.")[1].split(",")[0]
        elif not in_code or not line:
            continue
        elif line.startswith(".sectioninfo"):
            registers = int(match[1]) if (match := re.search(r"SHI_REGISTERS=(\d+)", line)) else registers
        elif match := _LABEL.match(line):
            labels[match[1]] = len(found)
        elif match := _SECOND_WORD.match(line):
            address, statement, _ = found[-1]
            found[-1] = address, statement, int(match[1], 16)
        elif (match := _LINE.match(line)) and match[2]:
            address = int(match[1], 16) if match[1] else len(found) * INSTRUCTION_BYTES
            found.append((address, match[2], None))
        elif not line.startswith((".", "//", "@")):
            raise InputError(f"cannot read this line of SASS: {line!r}")
    if not found:
        raise InputError("no instructions in this text; expected what `nvdisasm -c -hex` prints")
    return Program(
        name,
        registers,
        tuple(
            _instruction(index, address, statement, high, labels)
            for index, (address, statement, high) in enumerate(found)
        ),
    )


def _instruction(
    index: int, address: int, statement: str, high: int | None, labels: dict[str, int]
) -> Instruction:
    match = _STATEMENT.match(statement)
    if not match:
        raise InputError(f"cannot read the instruction at {address:#x}: {statement!r}")
    negated, number, opcode, modifiers, operands = match.groups()
    predicate = Predicate(_predicate_number(number or "T"), bool(negated))
    parts = _split(operands or "")
    try:
        read = tuple(_operand(part, labels) for part in parts)
    except ValueError as error:
        raise InputError(f"cannot read the instruction at {address:#x}: {statement!r}: {error}") from None
    return Instruction(
        index,
        address,
        opcode,
        tuple(modifiers.split(".")[1:]),
        read,
        predicate,
        NO_CONTROL if high is None else ControlCode.decode(high),
        statement,
    )


def _split(operands: str) -> list[str]:
    """Operands at commas; the one of ``RET.REL R14 `(kernel)`` is separated by a blank."""
    operands = re.sub(r"(?<=\w) `", ", `", operands)
    return [part.strip() for part in operands.split(",") if part.strip()]


def _predicate_number(text: str) -> int:
    return TRUE_PREDICATE if text == "T" else int(text)


def _register_number(text: str) -> int:
    return ZERO_REGISTER if text == "Z" else int(text)


def _operand(text: str, labels: dict[str, int]) -> Operand:
    text = text.replace(".reuse", "")
    if match := re.fullmatch(r"(!?)P([0-6T])", text):
        return Predicate(_predicate_number(match[2]), bool(match[1]))
    if match := re.fullmatch(r"`\(([^)]+)\)", text):
        if match[1] not in labels:
            raise ValueError(f"no label {match[1]}")
        return Target(labels[match[1]])
    if text.startswith("["):
        return _address(text)
    if re.fullmatch(r"-?0x[0-9a-f]+", text):
        return Immediate(int(text, 16))
    if re.fullmatch(r"[+-]?(\d+(\.\d*)?(e[+-]?\d+)?|INF|[QS]?NAN)", text, re.IGNORECASE):
        return Immediate(float(re.sub("[QS](?=NAN)", "", text, flags=re.IGNORECASE)))
    if value := _value(text):
        return value
    if re.fullmatch(r"[A-Z][\w.]*", text):
        return Special(text)
    raise ValueError(f"what is {text!r}?")


def _value(text: str) -> Register | Constant | None:
    """A register or constant with its modifiers."""
    match = re.fullmatch(r"(-?)(~?)(\|?)(R(?:\d+|Z)|c\[[^]]+\]\[[^]]+\])((?:\.\w+)*)(\|?)((?:\.\w+)*)", text)
    if not match:
        return None
    negate, invert, bar, core, inner, _, outer = match.groups()
    selector = (inner + outer).lstrip(".")
    if core.startswith("R"):
        return Register(_register_number(core[1:]), bool(negate), bool(bar), bool(invert), selector)
    place = re.fullmatch(r"c\[0x([0-9a-f]+)\]\[(?:R(\d+|Z)\+?)?(?:0x([0-9a-f]+))?\]", core)
    if not place:
        raise ValueError(f"what is {core!r}?")
    constant = Constant(
        int(place[1], 16), int(place[3] or "0", 16), _register_number(place[2] or "Z"), selector=selector
    )
    return replace(constant, negate=bool(negate), absolute=bool(bar), invert=bool(invert))


def _address(text: str) -> Address:
    match = re.fullmatch(r"\[(?:R(\d+|Z)(?:\.64|\.U32)?)?\+?(-?0x[0-9a-f]+)?\]", text)
    if not match:
        raise ValueError(f"what is {text!r}?")
    return Address(_register_number(match[1] or "Z"), int(match[2] or "0", 16))
