"""Compiles Triton and Gluon kernels for GPUs that are not there, down to machine code.

Under the interpreter a jitted function is no longer one that Triton can compile, so a second process without
``TRITON_INTERPRET`` does it: this file, run as a script, reads requests and writes answers as lines of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CAPABILITIES = (70, 80, 90)  # what every kernel must compile for


@dataclass(frozen=True)
class Compiled:
    """What a kernel became.

    Attributes:
        ptx: the PTX text.
        registers: registers per thread.
        stack_bytes: local memory per thread; above 0 when registers were spilled.
        shared_bytes: shared memory per program.
    """

    ptx: str
    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_for(
    fn: Any, signature: dict[str, str], constants: dict[str, Any], capability: int, **options: Any
) -> Compiled:
    """Compile a kernel for a compute capability such as 70.

    ``signature`` gives a type to every run-time argument (``*fp16``, ``i32``, ``fp32``) and ``constants`` a
    value to every other one; None leaves an optional pointer out. Pointers count as aligned to 16 bytes;
    write ``i32:16`` for an integer that is a multiple of 16. ``options`` are Triton's, such as ``num_warps``.

    ``fn`` must be a jitted function at the top of a module that can be imported by its name.

    Raises:
        AssertionError: it does not compile; the message is Triton's.
    """
    function = fn.fn  # of a JITFunction and of an interpreted one
    request = {
        "module": function.__module__,
        "name": function.__name__,
        "signature": signature,
        "constants": constants,
        "capability": capability,
        "options": options,
    }
    process = _compiler()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, "the compiler process died"
    answer = json.loads(line)
    assert "error" not in answer, f"{function.__name__} for sm_{capability}: {answer['error']}"
    return Compiled(**answer)


@cache
def _compiler() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, __file__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    fn = getattr(importlib.import_module(request["module"]), request["name"])
    names, constants = fn.arg_names, request["constants"]
    missing = set(names) ^ (set(request["signature"]) | set(constants))
    if missing:
        raise TypeError(f"arguments neither typed nor given a value, or unknown: {sorted(missing)}")
    types = {name: kind.removesuffix(":16") for name, kind in request["signature"].items()}
    aligned = {n for n, kind in request["signature"].items() if kind.startswith("*") or kind.endswith(":16")}
    source = (GluonASTSource if fn.is_gluon() else ASTSource)(
        fn,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", request["capability"], 32)
    kernel = triton.compile(source, target=target, options=request["options"])
    registers, stack = _resources(kernel.asm["cubin"])
    return {
        "ptx": kernel.asm["ptx"],
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": kernel.metadata.shared,
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, as cuobjdump reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _serve() -> None:
    # What Triton prints must not end up between the answers.
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            try:
                answer = _compile(json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # tests are imported as tests.kernels...
    _serve()
