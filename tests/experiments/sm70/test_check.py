"""What the check finds in machine code, and how it is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import triton
import triton.language as tl

from page4.experiments.cli import run
from page4.experiments.sm70 import check, check_report
from page4.experiments.sm70.check import Checked, Problem, examined, problems
from page4.experiments.sm70.compiling import Binary, CompilationError
from page4.experiments.sm70.kernel_list import KernelCase
from page4.experiments.sm70.launches import Launch
from page4.experiments.sm70.machine_code import LOADS, MachineCode, machine_code
from page4.experiments.sm70.promises import Known
from page4.experiments.sm70.toolchain import FOLDER_VARIABLE

TEXT = """
	.headerflags	@"EF_CUDA_64BIT_ADDRESS EF_CUDA_SM70 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM70)"
        /*0000*/                   LDG.E.128.SYS R4, [R2] ;              /* 0x0000008e7c917223 */
                                                                         /* 0x000fe200000000ff */
        /*0010*/              @!P0 LDG.E.U8.SYS R5, [R2] ;               /* 0x0000008e7c917223 */
        /*0020*/              @P3  STG.E.SYS [R2], R4 ;                  /* 0x0000008e7c917223 */
        /*0030*/                   HMMA.884.F32.F32.STEP0 R8, R2, R4, R8 ;
"""
CODE = {"HMMA.16816.F32": 8, "LDG.E.128": 2, "STG.E.128": 2, "EXIT": 1}


@triton.jit
def some_kernel(p_x, N: tl.constexpr, NATIVE: tl.constexpr, DECODE: tl.constexpr):
    """Never compiled."""


def case(kernel: str = "product_kernel", capability: int = 80, **constants: Any) -> KernelCase:
    arguments = {"p_x": None, "N": 32, "NATIVE": False, "DECODE": None, **constants}
    return KernelCase(kernel, "32x32", capability, Launch(some_kernel, (1,), arguments, {"num_warps": 4}))


def binary(capability: int = 80, **changes: Any) -> Binary:
    return replace(
        Binary("product_kernel", capability, b"", ".target sm_80\nmma.sync;", 32, 0, 4096), **changes
    )


def kinds(code: Mapping[str, int], made: Binary | None = None, of: KernelCase | None = None) -> list[str]:
    of = of or case()
    return [p.kind for p in problems(of, made or binary(of.capability), MachineCode(of.capability, code))]


def test_opcodes_are_read_from_a_disassembly() -> None:
    code = MachineCode.parse(TEXT)
    assert code.target == 70
    assert code.count("LDG") == 2 and code.count("HMMA") == 1 and code.count("LDL", "STL") == 0
    assert code.widths(*LOADS) == {1: 1, 16: 1} and code.widths("STG") == {4: 1}
    with pytest.raises(ValueError, match="target"):
        MachineCode.parse("")


def test_good_code_has_no_problems() -> None:
    assert kinds(CODE) == []


@pytest.mark.parametrize(
    ("kind", "code", "made"),
    [
        ("target", CODE, binary(90)),
        ("spills", CODE, binary(stack_bytes=8)),
        ("spills", {**CODE, "LDL.LU": 1}, binary()),
        ("shared memory", CODE, binary(shared_bytes=163 * 1024 + 1)),
        ("tensor cores", {**CODE, "HMMA.16816.F32": 0}, binary()),
        ("types", CODE, binary(ptx="mma.sync.m16n8k16.f32.bf16.bf16.f32 ;")),
        ("types", CODE, binary(ptx="cvt.rn.f16x2.e4m3x2 x, low;")),
        ("types", {**CODE, "F2FP.BF16.F32.PACK_AB": 1}, binary()),
        ("loads", {**CODE, "LDG.E.U8": 1}, binary()),
        ("loads", {**CODE, "LDG.E.128": 0, "LDG.E.64": 4}, binary()),
        ("stores", {**CODE, "STG.E.U16": 1}, binary()),
    ],
)
def test_every_broken_promise_is_found(kind: str, code: Mapping[str, int], made: Binary) -> None:
    present = {opcode: number for opcode, number in code.items() if number}
    assert kinds(present, made) == [kind]


def test_products_without_tensor_cores_are_reported_where_nothing_else_is_promised() -> None:
    ffma = {"FFMA": 99, "LDG.E.128.SYS": 2, "STG.E.128.SYS": 2}
    old = case(capability=70)
    found = examined(old, binary(70), MachineCode(70, ffma))
    assert found.passed and found.products == "FFMA"
    assert kinds(ffma, of=case("page4_attention_volta_kernel", 70)) == ["tensor cores"]
    with_them = examined(case(), binary(), MachineCode(80, CODE))
    assert with_them.products == "HMMA"


def test_fp8_is_allowed_where_a_launch_asks_for_it() -> None:
    code = {**CODE, "F2FP.F16.E4M3.UNPACK_B": 4}
    for constants in ({"NATIVE": True}, {"DECODE": "cvt.rn.f16x2.e4m3x2 x, low;"}):
        assert kinds(code, of=case(capability=90, **constants)) == []
        assert kinds(code, of=case(capability=80, **constants)) == ["types"]
    assert kinds(code, of=case(capability=90)) == ["types"]
    assert kinds({**code, "HFMA2.BF16_V2": 1}, of=case(capability=90, NATIVE=True)) == ["types"]


def test_known_problems_pass_and_their_absence_fails() -> None:
    listed = [Known("spills", "product_kernel", 80, "it is large", {"N": (32, 64)})]
    found = examined(case(), binary(stack_bytes=8), MachineCode(80, CODE), listed)
    assert found.passed and found.known[0][1] == "it is large"
    assert any("it is large" in line for line in check_report.remarks([found]))
    repaired = examined(case(), binary(), MachineCode(80, CODE), listed)
    assert not repaired.passed and repaired.repaired == ("spills",)
    assert any("remove it from KNOWN" in line for line in check_report.remarks([repaired]))
    for other in (case(N=128), case(capability=90)):
        spilled = binary(other.capability, stack_bytes=8)
        assert not examined(other, spilled, MachineCode(other.capability, CODE), listed).passed


def product_only(capability: int, thorough: bool = False) -> list[KernelCase]:
    return [found for found in ALL_CASES(capability, thorough) if found.kernel == "product_kernel"]


ALL_CASES: Callable[[int, bool], list[KernelCase]] = check.kernel_cases


def test_real_code_of_one_kernel_passes_for_every_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "kernel_cases", product_only)
    assert run(["sm70", "check", "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert sum("product_kernel" in line for line in table) == 3
    record = json.loads(last)
    assert record["launches"] == record["passed"] == 3
    assert [found["products"] for found in record["results"]] == ["FFMA", "HMMA", "HMMA"]


def test_opcodes_come_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Once:
        def disassemble(self, cubin: bytes) -> str:
            monkeypatch.setattr(Once, "disassemble", lambda *_: pytest.fail("it was disassembled again"))
            return TEXT

    monkeypatch.chdir(tmp_path)
    first = machine_code(binary(), Once())  # type: ignore[arg-type]
    assert machine_code(binary(), Once()) == first  # type: ignore[arg-type]


def test_a_broken_promise_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any, **options: Any) -> list[Checked]:
        problem = Problem("compile", "product_kernel for sm_80: out of luck")
        return [Checked(case(), None, None, (problem,), (), ())]

    monkeypatch.setattr(check, "check_all", broken)
    assert run(["sm70", "check"]) == 1
    assert "broken: product_kernel sm_80 32x32: compile: " in capsys.readouterr().out


def test_what_does_not_compile_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: Any) -> Any:
        yield 0, CompilationError("no\nluck")

    monkeypatch.setattr(check, "kernel_cases", product_only)
    monkeypatch.setattr(check, "compile_all", none)
    (found,) = check.check_all([70])
    assert found.broken == (Problem("compile", "no luck"),) and not found.passed
    assert list(check_report.rows([found])) and check_report.record([found])["passed"] == 0


def test_without_the_side_install_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert run(["sm70", "check"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and "make sm70" in error[0]
