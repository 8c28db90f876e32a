"""Compiles kernels for GPUs that are not there, down to machine code."""

from __future__ import annotations

import atexit
import base64
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from page4.experiments.sm70 import binary_cache
from page4.experiments.sm70.toolchain import Toolchain, installed

ResultT = TypeVar("ResultT")

CAPABILITIES = (70, 80, 90)  # what every kernel must compile for


class CompilationError(Exception):
    """A kernel that a Triton cannot compile for a GPU; the message is Triton's."""


@dataclass(frozen=True)
class Job:
    """A kernel with everything that decides its machine code.

    Attributes:
        function: a jitted function at the top of a module that can be imported by its name.
        signature: a type for every run-time argument (``*fp16``, ``i32``, ``fp32``). Pointers are aligned to
            16 bytes unless they are ``*fp16:unaligned``; ``i32:16`` is an integer that is a multiple of 16.
        constants: a value for every other argument; None leaves an optional pointer out.
        capability: compute capability of the GPU, such as 70.
        options: Triton's, such as ``num_warps``.
    """

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    capability: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        """The file that defines the kernel."""
        return Path(inspect.getfile(self._python)).resolve()

    @property
    def request(self) -> dict[str, Any]:
        """The job in JSON types, without what differs between machines."""
        return {
            "module": self._python.__module__,
            "function": self._python.__name__,
            "signature": dict(self.signature),
            "constants": dict(self.constants),
            "capability": self.capability,
            "options": dict(self.options),
        }

    @property
    def import_root(self) -> str:
        """The folder to import the kernel's module from by its name; empty where its name is mapped."""
        parts, file = self._python.__module__.split("."), self.source.with_suffix("")
        return str(file.parents[len(parts) - 1]) if file.parts[-len(parts) :] == tuple(parts) else ""

    @property
    def _python(self) -> Any:
        return self.function.fn  # of a JITFunction and of an interpreted one


@dataclass(frozen=True)
class Binary:
    """What a kernel became.

    Attributes:
        name: of the kernel's function.
        capability: of the GPU that it is for.
        cubin: the ELF file with the machine code.
        ptx: the PTX text that it was assembled from.
        registers: per thread.
        stack_bytes: local memory per thread; above 0 when registers were spilled.
        shared_bytes: shared memory per program.
    """

    name: str
    capability: int
    cubin: bytes
    ptx: str
    registers: int
    stack_bytes: int
    shared_bytes: int


class Compiler:
    """A process that compiles with one Triton."""

    def __init__(self, toolchain: Toolchain) -> None:
        self.toolchain = toolchain
        packages = str(toolchain.packages)
        path = [entry or os.getcwd() for entry in sys.path]
        script = Path(__file__).with_name("compile_worker.py")
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            # Beside the script lie modules with names of the standard library: -P keeps them off the path.
            [sys.executable, "-P", script, json.dumps(path if packages in path else [packages, *path])],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        atexit.unregister(self._process.kill)

    def compile(self, job: Job) -> Binary:
        """Compile a kernel, or take it from the cache.

        Raises:
            CompilationError: Triton cannot, or its process died.
        """
        key = job_key(job, self.toolchain)
        known = cached(key)
        if known is not None:
            return known
        answer = self._ask({**job.request, "root": job.import_root})
        if "error" in answer:
            raise CompilationError(f"{job.request['function']} for sm_{job.capability}: {answer['error']}")
        cubin = base64.b64decode(answer["cubin"])
        registers, stack_bytes = self.toolchain.resources(cubin)
        values = {
            "name": job.request["function"],
            "capability": job.capability,
            **answer,
            "registers": registers,
            "stack_bytes": stack_bytes,
        }
        binary_cache.write(key, values)
        return Binary(**{**values, "cubin": cubin})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the compiler process died"}
        return answer


def job_key(job: Job, toolchain: Toolchain) -> str:
    """What a job's binary is kept under; changes with the sources behind the kernel."""
    return binary_cache.digest(job.request, job.source, toolchain.version)


def cached(key: str) -> Binary | None:
    """The binary that was kept under a key, if any."""
    values = binary_cache.read(key)
    return None if values is None else Binary(**{**values, "cubin": base64.b64decode(values["cubin"])})


def compile_for(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    toolchain: Toolchain | None = None,
    **options: Any,
) -> Binary:
    """Compile one kernel with the installed Triton, or with another; arguments as in :class:`Job`.

    Raises:
        CompilationError: it does not compile.
    """
    return _compiler(toolchain or installed()).compile(
        Job(function, signature, constants, capability, options)
    )


def compile_all(
    jobs: Sequence[Job],
    toolchain: Toolchain,
    processes: int,
    examine: Callable[[Job, Binary], ResultT],
) -> Iterator[tuple[int, ResultT | CompilationError]]:
    """Compile and examine jobs in several processes; yields ``(index, result)`` as they end.

    What changed since it was last compiled comes first, the latest change before the others.
    """
    threads = threading.local()  # every thread has a process of its own, once it needs one
    compilers: list[Compiler] = []

    def run(index: int) -> tuple[int, ResultT | CompilationError]:
        job = jobs[index]
        binary = cached(job_key(job, toolchain))
        try:
            if binary is None:
                if not hasattr(threads, "compiler"):
                    threads.compiler = Compiler(toolchain)
                    compilers.append(threads.compiler)
                compiler: Compiler = threads.compiler
                binary = compiler.compile(job)
        except CompilationError as error:
            return index, error
        return index, examine(job, binary)

    def urgency(index: int) -> tuple[bool, float]:
        job = jobs[index]
        changed = max(file.stat().st_mtime for file in binary_cache.source_files(job.source))
        return binary_cache.has(job_key(job, toolchain)), -changed

    pool = ThreadPoolExecutor(processes)
    try:
        futures = [pool.submit(run, index) for index in sorted(range(len(jobs)), key=urgency)]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for compiler in compilers:
            compiler.close()


@cache
def _compiler(toolchain: Toolchain) -> Compiler:
    return Compiler(toolchain)
