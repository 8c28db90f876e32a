"""The kernels for the tensor cores of compute capability 7.0, as machine code on the emulator.

Their own tests in ``tests/kernels`` execute PTX. Here the same tests compile with the side install and
execute what ``ptxas`` made of it, ``HMMA.884`` and all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from page4.experiments.sm70.assembly import Program, parse
from page4.experiments.sm70.compiling import Binary, Compiler, Job
from page4.experiments.sm70.emulator import Argument, Buffer, Run, run
from page4.kernels import page4_attention_merge_triton
from tests.kernels import test_index_scores_volta as scores
from tests.kernels import test_page4_attention_gluon as attention
from tests.kernels.ptx_emulator import Pointer

if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU of this machine", allow_module_level=True)

from .emulated_launch import emulated_launches


@pytest.fixture(autouse=True)
def machine_code(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    programs: dict[str, Program] = {}
    runs: list[Run] = []

    def compile_for(
        function: Any, signature: dict[str, str], constants: dict[str, Any], capability: int, **options: Any
    ) -> Binary:
        binary = compiler.compile(Job(function, signature, constants, capability, options))
        programs[binary.ptx] = parse(compiler.toolchain.disassemble(binary.cubin))
        return binary

    def run_grid(
        ptx: str, arguments: Sequence[Any], grid: tuple[int, int, int], threads: int, shared_bytes: int
    ) -> None:
        passed: list[Argument] = [
            Buffer(x.array, offset=x.byte_offset) if isinstance(x, Pointer) else x for x in arguments
        ]
        program = programs[ptx]
        assert any(instruction.opcode == "HMMA" for instruction in program.instructions)
        runs.append(run(program, grid=grid, warps=threads // 32, arguments=passed, shared_bytes=shared_bytes))

    for module in (scores, attention):
        monkeypatch.setattr(module, "compile_for", compile_for)
        monkeypatch.setattr(module, "run_grid", run_grid)
    with emulated_launches(compiler) as others:
        yield
    assert runs, "nothing was launched"
    assert not [race for run in (*runs, *others) for race in run.races]


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8"])
def test_attention_in_every_format(kv_format: str) -> None:
    attention.test_formats(attention.mma884(2, 32, 4), kv_format, False)


def test_attention_with_eight_warps() -> None:
    attention.test_formats(attention.mma884(2, 64, 8), "e4m3", False)


@pytest.mark.parametrize("splits", [2, 7, 33])
def test_attention_merged_by_single_warps(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a V100; these tensors are on the CPU."""
    monkeypatch.setattr(page4_attention_merge_triton, "_adds_in_one_warp", lambda device: True)
    attention.test_formats(attention.mma884(splits, 32, 4), "e4m3", False)


@pytest.mark.parametrize(
    ("kv_heads", "group", "rows", "dim", "config"),
    [
        (2, 6, 4, 256, attention.mma884(1, 32, 4)),
        (1, 16, 6, 64, attention.mma884(1, 32, 2, head_splits=2)),
        (1, 5, 7, 128, attention.mma884(3, 64, 4)),
        (3, 1, 1, 128, attention.mma884(1, 32, 2)),
    ],
)
def test_attention_of_other_shapes(kv_heads: int, group: int, rows: int, dim: int, config: Any) -> None:
    attention.test_heads_dimensions_and_warps(kv_heads, group, rows, dim, config, "e4m3")


def test_attention_with_scales_of_any_size() -> None:
    attention.test_scales_of_tokens_may_differ_by_any_factor(8.0, 3)


@pytest.mark.parametrize("splits", [1, 3])
def test_attention_without_tokens(splits: int) -> None:
    attention.test_rows_without_tokens_and_padding_groups(splits, 64, attention.mma884(splits, 32, 2))


def test_attention_of_several_requests() -> None:
    attention.test_groups_of_several_requests(64, attention.mma884(2, 32, 2))


@pytest.mark.parametrize(
    ("row_counts", "rows_per_group", "heads", "dim", "tile_blocks", "splits"),
    [([4, 4, 3], 4, 4, 128, 32, 2), ([3], 3, 3, 64, 16, 2), ([7], 7, 1, 256, 32, 1)],
)
def test_scores(
    row_counts: list[int], rows_per_group: int, heads: int, dim: int, tile_blocks: int, splits: int
) -> None:
    scores.test_scores_equal_the_definition(row_counts, rows_per_group, heads, dim, tile_blocks, splits)


def test_missing_barriers_are_found(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first: what lies before it, every warp stores for itself.

    The result stays right without any of them, as the emulator runs warps in step.
    """
    executed = attention.run_grid
    races: list[bool] = []

    def run_grid(
        ptx: str, arguments: Sequence[Any], grid: tuple[int, int, int], threads: int, shared_bytes: int
    ) -> None:
        executed(ptx, arguments, grid, threads, shared_bytes)
        passed = [Buffer(x.array, offset=x.byte_offset) if isinstance(x, Pointer) else x for x in arguments]
        parts = code[ptx].split("BAR.SYNC 0x0")
        for place in range(1, len(parts)):
            broken = "NOP".join(["BAR.SYNC 0x0".join(parts[:place]), "BAR.SYNC 0x0".join(parts[place:])])
            found = run(
                parse(broken), grid=grid, warps=threads // 32, arguments=passed, shared_bytes=shared_bytes
            )
            races.append(bool(found.races))

    code: dict[str, str] = {}
    compiled = attention.compile_for

    def compile_for(*given: Any, **options: Any) -> Binary:
        binary = compiled(*given, **options)
        code[binary.ptx] = compiler.toolchain.disassemble(binary.cubin)
        return binary

    monkeypatch.setattr(attention, "run_grid", run_grid)
    monkeypatch.setattr(attention, "compile_for", compile_for)
    attention.test_formats(attention.mma884(2, 32, 4), "e4m3", False)
    assert len(races) >= 4 and all(races[1:])
