"""Small Triton kernels whose machine code for compute capability 7.0 lies in ``fixtures``.

``python -c "from tests.experiments.sm70.small_kernels import *; write_fixtures()"`` writes it again, with the
Triton of the side install.
"""

from __future__ import annotations

import re
from pathlib import Path

import triton
import triton.language as tl

from page4.experiments.sm70.assembly import Program, parse
from page4.experiments.sm70.compiling import Compiler, Job
from page4.experiments.sm70.toolchain import side_install

FIXTURES = Path(__file__).with_name("fixtures")


@triton.jit
def row_sums(p_x, p_sum, columns, BN: tl.constexpr):
    row = tl.program_id(0)
    o_n = tl.arange(0, BN)
    b_x = tl.load(p_x + row * columns + o_n, mask=o_n < columns, other=0.0)  # [BN]
    tl.store(p_sum + row, tl.sum(b_x))


@triton.jit
def scaled(p_x, p_out, scale, count, BN: tl.constexpr):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(p_out + o_n, tl.load(p_x + o_n, mask=o_n < count).to(tl.float32) * scale, mask=o_n < count)


@triton.jit
def reversed_rows(p_x, p_out, N: tl.constexpr):
    o_n = tl.arange(0, N)
    b_x = tl.load(p_x + o_n)  # [N]
    tl.store(p_out + o_n, tl.gather(b_x, N - 1 - o_n, 0))


JOBS = {
    "row_sums": Job(row_sums, {"p_x": "*fp32", "p_sum": "*fp32", "columns": "i32"}, {"BN": 256}, 70),
    "scaled": Job(
        scaled, {"p_x": "*fp16", "p_out": "*fp32", "scale": "fp32", "count": "i32"}, {"BN": 256}, 70
    ),
    "reversed_rows": Job(reversed_rows, {"p_x": "*i32", "p_out": "*i32"}, {"N": 256}, 70, {"num_warps": 2}),
}
SHARED_BYTES = {"row_sums": 16, "scaled": 0, "reversed_rows": 1024}


def fixture(name: str) -> Program:
    """The machine code of a kernel."""
    return parse(fixture_text(name))


def fixture_text(name: str) -> str:
    return (FIXTURES / f"{name}.sass").read_text()


def machine_code(compiler: Compiler, name: str) -> tuple[str, int]:
    """A kernel's code as a fixture holds it, and its bytes of shared memory."""
    binary = compiler.compile(JOBS[name])
    lines = compiler.toolchain.disassemble(binary.cubin).splitlines()
    text = "\n".join(re.sub(" +", " ", line.strip()) for line in lines if line.strip())
    return text + "\n", binary.shared_bytes


def write_fixtures() -> None:
    """Compile all kernels and store their code."""
    compiler = Compiler(side_install())
    for name in JOBS:
        text, shared_bytes = machine_code(compiler, name)
        assert shared_bytes == SHARED_BYTES[name], (name, shared_bytes)
        (FIXTURES / f"{name}.sass").write_text(text)
