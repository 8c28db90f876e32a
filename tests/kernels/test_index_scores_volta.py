"""Index scores with ``mma.m8n8k4``: its PTX on the CPU, over permuted pages with poison, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from page4.experiments.sm70.compiling import Binary, compile_for
from page4.kernels.block_plan import RowGroups
from page4.kernels.index_scores_triton import default_scores_config, on_volta_tensor_cores
from page4.kernels.index_scores_volta import index_scores_volta_kernel, scores_tiles, volta_can_score
from tests.kernels.ptx_emulator import Pointer, run_grid
from tests.kernels.test_index_scores_triton import STALE, by_definition

WARPS = 2


def compiled(heads: int, dim: int, rows: int, tile_blocks: int, warps: int = WARPS) -> Binary:
    signature = {
        "p_queries": "*fp16", "stride_query_row": "i32:16", "stride_query_head": "i32:16",
        "p_pages": "*i32", "p_tables": "*i64", "stride_table": "i32", "p_positions": "*i64",
        "p_group_request": "*i32", "p_group_start": "*i32", "p_group_rows": "*i32", "p_scores": "*fp32",
        "stride_scores": "i32", "splits": "i32", "scale": "fp32",
    }  # fmt: skip
    sizes = {
        "HEADS": heads, "HEADS_PAD": 1 << (heads - 1).bit_length(), "DIM": dim, "ROWS": rows,
        "TILES": scores_tiles(heads, rows), "BN": tile_blocks, "WARPS": warps,
    }  # fmt: skip
    return compile_for(index_scores_volta_kernel, signature, sizes, 70, num_warps=warps)


def emulate(
    queries: Tensor, pages: Tensor, tables: Tensor, positions: Tensor, groups: RowGroups, scores: Tensor,
    tile_blocks: int, splits: int,
) -> None:  # fmt: skip
    """The launcher's steps with the emulator in the place of the GPU."""
    _, heads, dim = queries.shape
    kernel = compiled(heads, dim, groups.rows_per_group, tile_blocks)
    assert kernel.shared_bytes == 0
    whole = queries if queries._base is None else queries._base
    arguments: list[Any] = [
        Pointer(whole.numpy()), queries.stride(0), queries.stride(1), Pointer(pages.numpy()),
        Pointer(tables.numpy()), tables.stride(0), Pointer(positions.numpy()),
        *(Pointer(x.numpy()) for x in (groups.request, groups.start, groups.rows)),
        Pointer(scores.numpy()), scores.stride(0), splits, dim**-0.5,
    ]  # fmt: skip
    run_grid(kernel.ptx, arguments, (len(groups.rows), splits, 1), 32 * WARPS, kernel.shared_bytes)


@pytest.mark.parametrize(
    ("row_counts", "rows_per_group", "heads", "dim", "tile_blocks", "splits"),
    [
        ([4, 4, 3], 4, 4, 128, 32, 2),
        ([1, 1], 1, 4, 128, 16, 1),
        ([8, 9], 8, 4, 128, 32, 3),
        ([3], 3, 3, 64, 16, 2),
        ([5, 0], 4, 8, 128, 16, 1),
        ([7], 7, 1, 256, 32, 1),
        ([4], 4, 2, 256, 16, 7),
    ],
)
def test_scores_equal_the_definition(
    row_counts: list[int], rows_per_group: int, heads: int, dim: int, tile_blocks: int, splits: int
) -> None:
    """Requests of other lengths, stale table entries, NaN keys past the end, and a padding group."""
    torch.manual_seed(sum(row_counts))
    rows, max_pages = sum(row_counts), 12
    lengths = [9, 16 * max_pages, 77][: len(row_counts)]
    pages = torch.full((max_pages * len(row_counts), 4, dim), math.nan, dtype=torch.float16)
    tables = torch.full((len(row_counts), max_pages), STALE)
    free, keys = torch.randperm(len(pages)), []
    for request, length in enumerate(lengths):
        blocks = length // 4
        used = -(-blocks // 4)
        tables[request, :used], free = free[:used], free[used:]
        own = torch.randn(blocks, dim).half()
        pages[tables[request, torch.arange(blocks) // 4], torch.arange(blocks) % 4] = own
        keys.append(own)
    positions = torch.cat([torch.arange(n - count, n) for n, count in zip(lengths, row_counts, strict=True)])
    positions = positions.clamp_min(-1)
    projected = torch.randn(rows, (heads + 1) * dim).half()
    queries = projected[:, : heads * dim].unflatten(1, (heads, dim))
    total = sum(-(-count // rows_per_group) for count in row_counts)
    groups = RowGroups.of(row_counts, rows_per_group, groups=total + 1)
    scores = torch.full((rows, 4 * max_pages + 3), math.nan)
    emulate(queries, pages, tables, positions, groups, scores, tile_blocks, splits)
    every = zip(keys, *(x.split(row_counts) for x in (queries, positions, scores)), strict=True)
    for own, own_queries, own_positions, own_scores in every:
        expected = by_definition(own_queries, own)
        for row, position in enumerate(own_positions.tolist()):
            visible = (position + 1) // 4
            torch.testing.assert_close(
                own_scores[row, :visible].double(), expected[row, :visible], rtol=1e-5, atol=1e-5
            )
            assert own_scores[row, visible:].isnan().all()  # nothing is written there


@pytest.mark.parametrize(("heads", "dim", "rows"), [(4, 128, 1), (4, 128, 4), (4, 128, 8), (2, 256, 8)])
def test_it_compiles_without_spills_and_loads_16_bytes(heads: int, dim: int, rows: int) -> None:
    config = default_scores_config(narrow=True, volta=True)
    kernel = compiled(heads, dim, rows, config.tile_blocks, config.num_warps)
    assert kernel.stack_bytes == 0
    sets = config.tile_blocks // (8 * config.num_warps)
    assert kernel.ptx.count("mma.sync.aligned.m8n8k4") == sets * scores_tiles(heads, rows) * dim // 16
    assert "ld.global.v4.b32" in kernel.ptx
    assert "ld.global.b16" not in kernel.ptx and "bar.sync" not in kernel.ptx


def test_which_calls_have_room() -> None:
    assert volta_can_score(heads=4, dim=128, rows_per_group=8)
    assert not volta_can_score(heads=8, dim=128, rows_per_group=8)
    assert not volta_can_score(heads=4, dim=96, rows_per_group=1)
    assert not volta_can_score(heads=16, dim=64, rows_per_group=1)
    half = torch.zeros(1, 4, 128, dtype=torch.float16)
    assert not on_volta_tensor_cores(half, half, 4)  # no GPU
