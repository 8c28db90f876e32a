"""Compilation for GPUs that are not there, and the cache of its results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from page4.experiments.sm70 import binary_cache
from page4.experiments.sm70.compiling import (
    CAPABILITIES,
    Binary,
    CompilationError,
    Compiler,
    Job,
    compile_all,
    compile_for,
    job_key,
)
from page4.experiments.sm70.toolchain import side_install
from page4.kernels import block_select_triton, errors
from page4.kernels.product_check_triton import product_kernel

TYPES = {"p_a": "*fp16", "p_b": "*fp16", "p_c": "*fp32"}


def product(capability: int, **changes: Any) -> Job:
    return Job(product_kernel, TYPES, {"N": 32, **changes}, capability, {"num_warps": 4})


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler(side_install())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_kernel_becomes_machine_code_of_its_target(compiler: Compiler, capability: int) -> None:
    binary = compiler.compile(product(capability))
    assert (binary.name, binary.capability) == ("product_kernel", capability)
    assert f".target sm_{capability}" in binary.ptx
    assert 0 < binary.registers <= 255 and binary.stack_bytes == 0 and binary.shared_bytes > 0
    assert f"EF_CUDA_SM{capability}" in compiler.toolchain.disassemble(binary.cubin)


def test_the_second_time_nothing_is_compiled(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.compile(product(70))
    monkeypatch.setattr(compiler, "_ask", lambda request: pytest.fail("it was compiled again"))
    assert compiler.compile(product(70)) == first


def test_a_damaged_file_is_compiled_again(compiler: Compiler) -> None:
    first = compiler.compile(product(70))
    (file,) = binary_cache.FOLDER.glob("*.gz")
    for damage in (b"", b"no gzip", file.read_bytes()[:-20]):
        file.write_bytes(damage)
        assert compiler.compile(product(70)) == first


def test_the_key_depends_on_everything_that_decides_the_code() -> None:
    toolchain = side_install()
    jobs = (
        product(70),
        product(80),
        product(70, N=64),
        Job(product_kernel, {**TYPES, "p_c": "*fp32:unaligned"}, {"N": 32}, 70, {"num_warps": 4}),
        Job(product_kernel, TYPES, {"N": 32}, 70, {"num_warps": 8}),
    )
    assert len({job_key(job, toolchain) for job in jobs}) == len(jobs)
    assert job_key(product(70), toolchain) == job_key(product(70), toolchain)


def test_the_key_depends_on_the_sources(tmp_path: Path) -> None:
    source, helper = tmp_path / "kernel.py", tmp_path / "helper.py"
    source.write_text("from .helper import width\nfrom page4.kernels import errors\nimport page4.no_such\n")
    helper.write_text("width = 4\n")
    found = binary_cache.source_files(source)
    assert {source, helper, Path(errors.__file__).resolve()} <= set(found)
    assert [file.name for file in found if file.parent != tmp_path] == ["__init__.py", "errors.py"]

    def key() -> str:
        for function in (binary_cache.source_files, binary_cache._digest_of):
            function.cache_clear()
        return binary_cache.digest({}, source, "3.6.0")

    first = key()
    assert key() == first
    helper.write_text("width = 8\n")
    assert key() != first
    assert binary_cache.digest({}, source, "3.7.0") != key()


def test_a_kernels_sources_are_those_that_it_imports() -> None:
    source = Path(block_select_triton.__file__).resolve()
    names = {file.name for file in binary_cache.source_files(source)}
    assert {"block_select_triton.py", "block_plan.py", "dependent_launch.py"} <= names
    assert "index_scores_triton.py" not in names


def test_what_does_not_compile_says_why(compiler: Compiler) -> None:
    with pytest.raises(CompilationError, match=r"(?s)product_kernel for sm_70: .*power of 2"):
        compiler.compile(product(70, N=33))
    with pytest.raises(CompilationError, match="neither typed nor given a value"):
        compiler.compile(product(70, M=1))
    compiler.compile(product(70))  # it goes on


def test_a_process_that_dies_is_an_error() -> None:
    made = Compiler(side_install())
    made._process.kill()
    with pytest.raises(CompilationError, match="died"):
        made.compile(product(70))
    made.close()


def test_several_processes_begin_with_what_is_not_in_the_cache(compiler: Compiler) -> None:
    jobs = [product(70), product(80), product(70, N=33)]
    compiler.compile(jobs[0])
    order = []

    def examine(job: Job, binary: Binary) -> int:
        return job.capability

    for index, result in compile_all(jobs, compiler.toolchain, 1, examine):
        order.append(index)
        if index == 2:
            assert isinstance(result, CompilationError)
        else:
            assert result == jobs[index].capability
    assert order[-1] == 0 and sorted(order) == [0, 1, 2]


def test_the_installed_triton_compiles_too() -> None:
    assert ".target sm_90" in compile_for(product_kernel, TYPES, {"N": 32}, 90, num_warps=4).ptx
