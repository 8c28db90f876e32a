"""The process that compiles: a script that reads requests and writes answers as lines of JSON.

It is started with the import path as its argument. Under the interpreter a jitted function is no longer one
that Triton can compile, and the Triton that compiles need not be the installed one.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the function ``module.function`` down to machine code; fields as in ``compiling.Job``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if request["root"] and request["root"] not in sys.path:
        sys.path.append(request["root"])
    fn = getattr(importlib.import_module(request["module"]), request["function"])
    names, constants = fn.arg_names, request["constants"]
    unclear = set(names) ^ (set(request["signature"]) | set(constants))
    if unclear:
        raise TypeError(f"arguments neither typed nor given a value, or unknown: {sorted(unclear)}")
    types = {name: kind.partition(":")[0] for name, kind in request["signature"].items()}
    aligned = {n for n, kind in request["signature"].items() if _is_aligned(kind)}
    source = (GluonASTSource if fn.is_gluon() else ASTSource)(
        fn,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", request["capability"], 32)
    kernel = triton.compile(source, target=target, options=request["options"])
    return {
        "ptx": kernel.asm["ptx"],
        "cubin": base64.b64encode(kernel.asm["cubin"]).decode(),
        "shared_bytes": kernel.metadata.shared,
    }


def _is_aligned(kind: str) -> bool:
    return kind.endswith(":16") or (kind.startswith("*") and ":" not in kind)


def _reasons(error: BaseException | None) -> Iterator[str]:
    """What went wrong, and in the functions that it called."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__


def serve() -> None:
    """Answer every line of standard input, until it ends."""
    # What Triton prints must not end up between the answers.
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            try:
                answer = compile_request(json.loads(line))
            except Exception as error:  # compilers raise anything
                answer = {"error": "\n".join(_reasons(error))}
            print(json.dumps(answer), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    serve()
