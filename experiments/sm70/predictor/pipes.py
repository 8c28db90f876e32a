"""Which unit of a Volta multiprocessor executes an instruction, and for how long it is taken."""

from __future__ import annotations

from enum import IntEnum


class Pipe(IntEnum):
    """Units that instructions are issued to. Each scheduler has its own, but LSU serves all four."""

    FMA = 0
    ALU = 1
    FP16 = 2
    SPECIAL = 3
    TENSOR = 4
    CONTROL = 5
    FP64 = 6
    LSU = 7


class Kind(IntEnum):
    """What an instruction does beside computing."""

    PLAIN = 0
    GLOBAL_LOAD = 1
    GLOBAL_STORE = 2
    SHARED = 3  # loads, stores and atomics of shared memory, shuffles
    BARRIER = 4
    BRANCH = 5
    SYSTEM = 6  # reads a special register


# Cycles for which a warp's 32 lanes take the unit: 16 lanes a cycle, 4 special-function units a scheduler.
# A step of HMMA.884 is 256 multiply-adds, of 128 a cycle.
ISSUE_CYCLES = {
    Pipe.FMA: 2,
    Pipe.ALU: 2,
    Pipe.FP16: 2,
    Pipe.SPECIAL: 8,
    Pipe.TENSOR: 2,
    Pipe.CONTROL: 1,
    Pipe.FP64: 4,
    Pipe.LSU: 2,
}

_OPCODES = {
    Pipe.FMA: "FFMA FFMA32I FMUL FMUL32I FADD FADD32I FSWZADD IMAD IMUL",
    Pipe.FP16: "HFMA2 HMUL2 HADD2 HSET2 HSETP2 HMNMX2",
    Pipe.SPECIAL: "MUFU F2F F2I I2F FRND POPC FLO BREV I2I",
    Pipe.TENSOR: "HMMA",
    Pipe.FP64: "DADD DMUL DFMA DSETP",
    Pipe.LSU: "LDG STG LDS STS LDL STL LD ST LDC RED ATOM ATOMG ATOMS SHFL",
    Pipe.CONTROL: "BRA BRX JMP EXIT BAR NOP BSSY BSYNC BREAK BMOV CALL RET S2R CS2R DEPBAR WARPSYNC YIELD "
    "MEMBAR ERRBAR CCTL",
}
_PIPES = {opcode: pipe for pipe, opcodes in _OPCODES.items() for opcode in opcodes.split()}

# Local memory goes through L1 and L2 as global memory does.
_KINDS = {
    Kind.GLOBAL_LOAD: "LDG LDL LD",
    Kind.GLOBAL_STORE: "STG STL ST RED ATOM ATOMG",
    Kind.SHARED: "LDS STS ATOMS SHFL LDC",
    Kind.BARRIER: "BAR",
    Kind.BRANCH: "BRA BRX JMP CALL RET BREAK BSYNC",
    Kind.SYSTEM: "S2R",
}
_KIND_OF = {opcode: kind for kind, opcodes in _KINDS.items() for opcode in opcodes.split()}

SPILLS = frozenset({"LDL", "STL"})


def pipe_of(opcode: str) -> Pipe:
    """The unit of an opcode without its modifiers; integer and logic instructions are the rest."""
    return _PIPES.get(opcode, Pipe.ALU)


def kind_of(opcode: str) -> Kind:
    """What an opcode without its modifiers does beside computing."""
    return _KIND_OF.get(opcode, Kind.PLAIN)
