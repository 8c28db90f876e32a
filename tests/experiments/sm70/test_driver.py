"""What the CUDA driver is told, by a library in its place that notes it; it could take every kernel."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from page4.experiments.sm70.compiling import Compiler
from page4.experiments.sm70.driver import Driver, DriverError
from page4.experiments.sm70.kernel_list import kernel_cases
from page4.experiments.sm70.ptx_entry import EntryPoint, as_old_ptx, entry_point

PTX = """.version 8.7
.target sm_70
.visible .entry some_kernel(
	.param .u64 .ptr .global .align 1 some_kernel_param_0,
	.param .u32 some_kernel_param_1,
	.param .f32 some_kernel_param_2,
	.param .u64 .ptr .global .align 1 some_kernel_param_3,
	.param .u64 .ptr .global .align 1 some_kernel_param_4
)
.reqntid 64
.maxnreg 128
{
	ld.param.b64 %rd1, [some_kernel_param_0];
}
"""
ENTRY = EntryPoint("some_kernel", ("u64", "u32", "f32", "u64", "u64"), 64)


class Library:
    """Functions of the driver. A kernel's parameters are read from memory, as the driver reads them."""

    def __init__(self, **statuses: int) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._statuses = statuses
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._functions:

            class Function:
                argtypes: Any
                restype: Any

                def __call__(function, *given: Any) -> int:
                    assert len(given) == len(function.argtypes)
                    return self._called(name, given)

            self._functions[name] = Function()
        return self._functions[name]

    def _called(self, name: str, given: tuple[Any, ...]) -> int:
        if name == "cuGetErrorString":
            given[1]._obj.value = b"out of luck"
            return 0
        if name == "cuModuleLoadDataEx":
            settings = dict(zip(given[3], given[4], strict=True))
            assert settings[6] == 16384
            ctypes.memmove(settings[5], b"line 7\0", 7)
            given[0]._obj.value = 111
        if name == "cuModuleGetFunction":
            given[0]._obj.value = 222
        if name == "cuLaunchKernel":
            types = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64)
            passed = [kind.from_address(at).value for kind, at in zip(types, given[9], strict=True)]
            given = (given[0].value, *given[1:9], passed, given[10])
        self.calls.append((name, given))
        return self._statuses.get(name, 0)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [given for called, given in self.calls if called == name]


def test_the_entry_point_is_what_triton_wrote() -> None:
    assert entry_point(PTX) == ENTRY
    for broken, message in (
        (PTX.replace(".entry", ".func"), "0 kernels"),
        (PTX + PTX, "2 kernels"),
        (PTX.replace("[some_kernel_param_0]", "[some_kernel_param_3]"), "scratch memory"),
        (PTX.replace("[some_kernel_param_0]", "[some_kernel_param_4]"), "scratch memory"),
    ):
        with pytest.raises(ValueError, match=message):
            entry_point(broken)


def test_values_must_fit_the_parameters() -> None:
    x = torch.zeros(8)
    assert [p.value for p in ENTRY.packed([x[2:], -3, 0.5])] == [x.data_ptr() + 8, 2**32 - 3, 0.5, 0, 0]
    for values, message in (
        ([x, 1], "3 arguments, got 2"),
        ([x, 2**32, 0.5], "4294967296 does not fit into u32"),
        ([x, -(2**31) - 1, 0.5], "does not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            ENTRY.packed(values)


def test_a_launch_says_everything_to_the_driver() -> None:
    library, x = Library(), torch.zeros(8)
    driver = Driver(library)
    for n in (7, -1):
        driver.launch(PTX, [x, n, 0.5], (5, 2), 49152, 99)
    driver.launch(PTX, [x, 7, 0.5], (0, 2), 49152, 99)  # nothing to do
    (loaded,) = library.named("cuModuleLoadDataEx")
    assert loaded[1].decode() == PTX.replace("8.7", "6.4")
    ((_, module, name),) = library.named("cuModuleGetFunction")
    assert (module.value, name) == (111, b"some_kernel")
    ((_, attribute, shared_bytes),) = library.named("cuFuncSetAttribute")
    assert (attribute, shared_bytes) == (8, 49152)
    first, second = library.named("cuLaunchKernel")
    assert first[:9] == (222, 5, 2, 1, 64, 1, 1, 49152, 99) and first[10] is None
    assert first[9] == [x.data_ptr(), 7, 0.5, 0, 0] and second[9][1] == -1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("cuModuleLoadDataEx", r"cannot compile some_kernel: out of luck \(3\) line 7$"),
        ("cuModuleGetFunction", r"cannot find some_kernel: out of luck \(3\)$"),
        ("cuFuncSetAttribute", r"cannot give some_kernel 64 bytes of shared memory"),
        ("cuLaunchKernel", r"cannot launch some_kernel"),
    ],
)
def test_what_the_driver_refuses_is_said(function: str, message: str) -> None:
    driver = Driver(Library(**{function: 3}))
    with pytest.raises(DriverError, match=message):
        driver.launch(PTX, [torch.zeros(1), 1, 1.0], (1,), 64, 0)


def test_the_library_is_called_as_c_calls_it(tmp_path: Path) -> None:
    """Through a real library, which adds one to what the kernel's first parameter points to."""
    source, library = tmp_path / "cuda.c", tmp_path / "cuda.so"
    source.write_text(STUB, encoding="utf-8")
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as reason:
        pytest.skip(f"no C compiler: {reason}")
    x = torch.zeros(4, dtype=torch.int64)
    Driver(ctypes.CDLL(str(library))).launch(PTX, [x[1:], -5, 0.25], (3, 2), 64, 2**40 + 1)
    assert x.tolist() == [0, 1, 0, 0]


STUB = """
#include <string.h>
typedef void *P;
int cuGetErrorString(int e, const char **s) { *s = "wrong"; return 0; }
int cuModuleLoadDataEx(P *m, const char *t, unsigned n, int *o, P *v)
{ *m = (P)t; return n != 2 || o[0] != 5 || o[1] != 6 || (long)v[1] != 16384 || !strstr(t, ".version 6.4"); }
int cuModuleGetFunction(P *f, P m, const char *n)
{ *f = (P)0x123456789abcL; return strcmp(n, "some_kernel"); }
int cuFuncSetAttribute(P f, int a, int v) { return f != (P)0x123456789abcL || a != 8 || v != 64; }
int cuLaunchKernel(P f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned s, P t, P *p, P *e)
{
    if (f != (P)0x123456789abcL || x != 3 || y != 2 || z != 1 || bx != 64 || by != 1 || bz != 1) return 1;
    if (s != 64 || (long)t != (1L << 40) + 1 || e) return 2;
    if (*(int *)p[1] != -5 || *(float *)p[2] != 0.25f || *(P *)p[3] || *(P *)p[4]) return 3;
    ++**(long **)p[0];
    return 0;
}
"""


def test_a_driver_can_take_every_kernel(compiler: Compiler, tmp_path: Path) -> None:
    """One launch of each: ptxas, which is the driver's compiler too, makes code for a newer GPU of it."""
    seen: set[str] = set()
    for case in kernel_cases(70):
        if case.kernel in seen:
            continue
        seen.add(case.kernel)
        binary, job = compiler.compile(case.job), case.job
        entry = entry_point(binary.ptx)
        assert entry.name == case.kernel and entry.threads == 32 * case.launch.options.get("num_warps", 4)
        kinds = [{"*": "u64", "f": "f32", "i": "u" + kind[1:3]}[kind[0]] for kind in job.signature.values()]
        assert list(entry.parameters) == [*kinds, "u64", "u64"]
        file = tmp_path / f"{case.kernel}.ptx"
        file.write_text(as_old_ptx(binary.ptx), encoding="utf-8")
        command = [compiler.toolchain.tool("ptxas"), "-arch=sm_90", file, "-o", tmp_path / "cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, (case.kernel, done.stderr)
