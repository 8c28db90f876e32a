"""Checks the machine code of every kernel of the hot path against what it promises."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from page4.experiments.progress import Reporter, Silent
from page4.experiments.sm70.compiling import CAPABILITIES, Binary, CompilationError, Job, compile_all
from page4.experiments.sm70.kernel_list import KernelCase, kernel_cases
from page4.experiments.sm70.machine_code import LOADS, STORES, MachineCode, machine_code
from page4.experiments.sm70.promises import KNOWN, SHARED_BYTES, Known, promise_of
from page4.experiments.sm70.toolchain import side_install

PROCESSES = 2
_TENSOR_CORES = ("HMMA", "HGMMA")
_NARROW_FLOATS = re.compile(r"\b(?:\w+\.)*(?:bf16|e4m3|e5m2)(?:x2)?\b")


@dataclass(frozen=True)
class Problem:
    """A broken promise.

    Attributes:
        kind: ``compile``, ``target``, ``spills``, ``shared memory``, ``tensor cores``, ``types``, ``loads``
            or ``stores``.
        text: what was found, in one line.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Checked:
    """A launch and what was found in its code.

    Attributes:
        case: the launch.
        binary, code: None where it does not compile.
        broken: problems that nobody knew of.
        known: problems with the reasons why they are there.
        repaired: kinds of problems that are listed as known and are not there.
    """

    case: KernelCase
    binary: Binary | None
    code: MachineCode | None
    broken: tuple[Problem, ...]
    known: tuple[tuple[Problem, str], ...]
    repaired: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is as it was promised or known to be."""
        return not self.broken and not self.repaired

    @property
    def products(self) -> str:
        """The instructions that compute its matrix products: ``HMMA``, ``HGMMA``, ``FFMA`` or none."""
        if self.code is None or promise_of(self.case.kernel).tensor_cores is None:
            return ""
        return "+".join(name for name in _TENSOR_CORES if self.code.count(name)) or "FFMA"


def check_all(
    capabilities: Sequence[int] = CAPABILITIES, thorough: bool = False, progress: Reporter | None = None
) -> list[Checked]:
    """Compile every launch for every GPU and check its code; in the order of the list of kernels.

    ``thorough`` is that of :func:`~page4.experiments.sm70.step_inputs.step_shapes`.

    Raises:
        InputError: the Triton for sm_70 is not there.
    """
    toolchain = side_install()
    cases = [case for capability in capabilities for case in kernel_cases(capability, thorough)]
    results: dict[int, Checked] = {}
    progress = progress or Silent()
    progress.start(len(cases))

    def examine(job: Job, binary: Binary) -> tuple[Binary, MachineCode]:
        return binary, machine_code(binary, toolchain)

    for index, found in compile_all([case.job for case in cases], toolchain, PROCESSES, examine):
        case = cases[index]
        if isinstance(found, CompilationError):
            broken = (Problem("compile", " ".join(str(found).split())),)
            results[index] = Checked(case, None, None, broken, (), ())
        else:
            results[index] = examined(case, *found)
        progress.advance()
    return [results[index] for index in range(len(cases))]


def examined(case: KernelCase, binary: Binary, code: MachineCode, listed: Iterable[Known] = KNOWN) -> Checked:
    """A launch's code against its promise and against what is known to break it."""
    constants = case.job.constants
    reasons = {
        known.kind: known.reason for known in listed if known.covers(case.kernel, case.capability, constants)
    }
    found = problems(case, binary, code)
    kinds = {problem.kind for problem in found}
    return Checked(
        case,
        binary,
        code,
        broken=tuple(problem for problem in found if problem.kind not in reasons),
        known=tuple((problem, reasons[problem.kind]) for problem in found if problem.kind in reasons),
        repaired=tuple(kind for kind in reasons if kind not in kinds),
    )


def problems(case: KernelCase, binary: Binary, code: MachineCode) -> list[Problem]:
    """Every promise that a binary breaks."""
    promise, found = promise_of(case.kernel), []
    if not code.target == binary.capability == case.capability:
        found.append(Problem("target", f"the code is for sm_{code.target}"))
    local = code.count("LDL", "STL")
    if binary.stack_bytes or local:
        found.append(Problem("spills", f"{binary.stack_bytes} bytes a thread, {local} loads and stores"))
    if binary.shared_bytes > SHARED_BYTES[case.capability]:
        limit = SHARED_BYTES[case.capability]
        found.append(Problem("shared memory", f"{binary.shared_bytes} bytes of {limit}"))
    if promise.tensor_cores and case.capability >= promise.tensor_cores and not code.count(*_TENSOR_CORES):
        found.append(Problem("tensor cores", f"no {' or '.join(_TENSOR_CORES)}"))
    types = _unwanted_types(case, binary, code)
    if types:
        found.append(Problem("types", ", ".join(types)))
    found += _narrow("loads", code.widths(*LOADS), promise.loads)
    found += _narrow("stores", code.widths(*STORES), promise.stores)
    return found


def _narrow(kind: str, widths: Mapping[int, int], promised: tuple[int, int]) -> list[Problem]:
    """Whether accesses are narrower than promised; a kernel need not have any."""
    if not widths or (min(widths) >= promised[0] and max(widths) >= promised[1]):
        return []
    found = ", ".join(f"{number} of {width} bytes" for width, number in widths.items())
    return [Problem(kind, f"{found}; promised are {promised[0]} to {promised[1]}")]


def _unwanted_types(case: KernelCase, binary: Binary, code: MachineCode) -> list[str]:
    """Instructions on bfloat16, or on FP8 where the launch does not ask for its conversions."""
    wanted = case.capability >= 90 and _converts_fp8(case.job.constants)
    in_ptx = set(_NARROW_FLOATS.findall(binary.ptx))
    in_code = code.with_type("BF16", "E4M3", "E5M2")
    return sorted(name for name in (*in_ptx, *in_code) if "bf16" in name.lower() or not wanted)


def _converts_fp8(constants: Mapping[str, Any]) -> bool:
    """Whether a launch asks for FP8 conversions in hardware: by a flag, or by the assembly that decodes."""
    return bool(constants.get("NATIVE")) or "e4m3" in str(constants.get("DECODE"))
