"""Index scores in Triton: the definition, over permuted pages, with poison wherever nothing may be read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from page4.experiments.sm70.compiling import CAPABILITIES, compile_for
from page4.kernels.block_plan import RowGroups
from page4.kernels.errors import InputError
from page4.kernels.index_scores_triton import index_scores_kernel, index_scores_triton

from .attention_cases import DEVICE

STALE = 10**9  # a page that no cache has


def by_definition(queries: Tensor, keys: Tensor) -> Tensor:
    """FP64 scores of rows ``[R, Hi, Di]`` against blocks ``[nb, Di]``."""
    dots = torch.einsum("rhd,nd->rhn", queries.double(), keys.double())
    return dots.relu().sum(1) / math.sqrt(keys.shape[1])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**16),
    row_counts=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    shape=st.sampled_from([(1, 8), (2, 16), (3, 24), (4, 128)]),
    dtypes=st.sampled_from([("float32", "float32"), ("float16", "float16"), ("float32", "float16")]),
    rows_per_group=st.sampled_from([1, 3, 4, 7, 8]),
    padding=st.integers(0, 1),
)
def test_scores_equal_the_definition(
    seed: int,
    row_counts: list[int],
    shape: tuple[int, int],
    dtypes: tuple[str, str],
    rows_per_group: int,
    padding: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, dim = shape
    query_dtype, key_dtype = (getattr(torch, name) for name in dtypes)
    rows, max_pages = sum(row_counts), 40
    lengths = torch.randint(1, 16 * max_pages + 1, (len(row_counts),), generator=generator).tolist()
    num_pages = max_pages * len(row_counts)
    pages = torch.full((num_pages, 4, dim), math.nan, dtype=key_dtype)
    tables = torch.full((len(row_counts), max_pages), STALE)
    free = torch.randperm(num_pages, generator=generator)
    keys = []
    for request, length in enumerate(lengths):
        blocks = length // 4  # the slots of later blocks stay NaN, their pages stale
        own = torch.randn(blocks, dim, generator=generator).to(key_dtype)
        used = -(-blocks // 4)
        tables[request, :used], free = free[:used], free[used:]
        pages[tables[request, torch.arange(blocks) // 4], torch.arange(blocks) % 4] = own
        keys.append(own)
    positions = torch.cat(
        [torch.arange(length - count, length) for length, count in zip(lengths, row_counts, strict=True)]
    ).clamp_min(-1)
    # A row of the projection holds the queries of all heads and then the raw key.
    projected = torch.randn(rows, (heads + 1) * dim, generator=generator).to(query_dtype)
    queries = projected[:, : heads * dim].unflatten(1, (heads, dim))
    total = sum(-(-count // rows_per_group) for count in row_counts)
    groups = RowGroups.of(row_counts, rows_per_group, groups=total + padding, device=DEVICE)

    scores = torch.full((rows, 4 * max_pages + 3), math.nan, device=DEVICE)
    # Moving a view to another device would drop its strides.
    queries_there = projected.to(DEVICE)[:, : heads * dim].unflatten(1, (heads, dim))
    index_scores_triton(
        queries_there, pages.to(DEVICE), tables.to(DEVICE), positions.to(DEVICE), groups, scores
    )
    scores = scores.cpu()
    for own, own_queries, own_positions, own_scores in zip(
        keys,
        queries.split(row_counts),
        positions.split(row_counts),
        scores.split(row_counts),
        strict=True,
    ):
        expected = by_definition(own_queries, own)
        for row, position in enumerate(own_positions.tolist()):
            visible = (position + 1) // 4
            torch.testing.assert_close(
                own_scores[row, :visible].double(), expected[row, :visible], rtol=1e-5, atol=1e-5
            )
            assert own_scores[row, visible:].isnan().all()  # nothing is written there


def scores_of_one_row(queries: Tensor, page: Tensor) -> Tensor:
    """The four scores of a request of 16 tokens in one page."""
    tables, position = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), torch.tensor([15], device=DEVICE)
    groups, scores = RowGroups.of([1], 1, device=DEVICE), torch.empty(1, 4, device=DEVICE)
    index_scores_triton(queries.to(DEVICE), page[None].to(DEVICE), tables, position, groups, scores)
    return scores.cpu()[0]


def test_heads_that_point_away_score_exactly_zero() -> None:
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    scores = scores_of_one_row(queries, torch.tensor([[-1.0, -2.0], [3.0, -5.0], [-1.0, 0.0], [0.0, 0.0]]))
    assert scores[0] == scores[2] == scores[3] == 0.0
    torch.testing.assert_close(scores[1], torch.tensor(3.0 / math.sqrt(2)))


def test_half_precision_products_accumulate_in_fp32() -> None:
    scores = scores_of_one_row(torch.full((1, 2, 64), 60.0).half(), torch.full((4, 64), 60.0).half())
    assert scores.tolist() == [2 * 64 * 3600 / 8.0] * 4  # the products sum beyond FP16


def test_keys_beyond_two_gibi_elements() -> None:
    """Memory that is never touched costs nothing, so this runs anywhere."""
    dim = 128
    far = 2**31 // (4 * dim) + 1
    pages = torch.empty(far + 1, 4, dim, dtype=torch.float16, device=DEVICE)
    own = torch.randn(4, dim, generator=torch.Generator().manual_seed(0)).half()
    pages[far] = own.to(DEVICE)
    queries = torch.randn(1, 4, dim, generator=torch.Generator().manual_seed(1)).half()
    scores = index_scores_triton(
        queries.to(DEVICE), pages, torch.tensor([[far]], device=DEVICE), torch.tensor([15], device=DEVICE),
        RowGroups.of([1], 1, device=DEVICE), torch.empty(1, 4, device=DEVICE),
    )  # fmt: skip
    torch.testing.assert_close(scores.cpu().double(), by_definition(queries, own), rtol=1e-5, atol=1e-5)


def test_no_rows_are_scored() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    scores = index_scores_triton(
        torch.zeros(0, 2, 8),
        torch.zeros(1, 4, 8),
        none.view(0, 0),
        none,
        RowGroups.of([], 4),
        torch.zeros(0, 4),
    )
    assert scores.shape == (0, 4)


def test_wrong_inputs_are_refused() -> None:
    queries, pages, tables = torch.zeros(2, 2, 8), torch.zeros(3, 4, 8), torch.zeros(1, 3, dtype=torch.int64)
    positions, groups, scores = torch.arange(2), RowGroups.of([2], 2), torch.zeros(2, 12)

    def refused(match: str, **wrong: Tensor) -> None:
        inputs = {
            "index_q": queries, "compressed_pages": pages, "block_tables": tables, "positions": positions,
            "scores": scores,
        }  # fmt: skip
        with pytest.raises(InputError, match=match):
            index_scores_triton(**(inputs | wrong), groups=groups)

    refused("index_q", index_q=queries[0])
    refused("index_q", index_q=torch.zeros(2, 8, 2).mT)
    refused("compressed_pages", compressed_pages=torch.zeros(3, 2, 8))
    refused("compressed_pages", compressed_pages=torch.zeros(3, 4, 9))
    refused("contiguous", compressed_pages=torch.zeros(6, 4, 8)[::2])
    refused("block_tables", block_tables=tables[0])
    refused("positions", positions=positions[:1])
    refused("scores", scores=scores.half())
    refused("scores", scores=scores[:1])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "tile", "rows"), [("fp16", 128, 4), ("fp32", 32, 8)])
def test_scores_compile_without_spills(capability: int, dtype: str, tile: int, rows: int) -> None:
    signature = {
        "p_queries": f"*{dtype}", "stride_query_row": "i32:16", "stride_query_head": "i32:16",
        "p_pages": f"*{dtype}", "p_tables": "*i64", "stride_table": "i32", "p_positions": "*i64",
        "p_group_request": "*i32", "p_group_start": "*i32", "p_group_rows": "*i32", "p_scores": "*fp32",
        "stride_scores": "i32", "splits": "i32", "scale": "fp32",
    }  # fmt: skip
    sizes = {"HEADS": 4, "DIM": 128, "HEADS_PAD": 4, "DIM_PAD": 128, "ROWS_PAD": rows, "BN": tile}
    sizes |= {"DEPENDENT": capability >= 90}
    compiled = compile_for(index_scores_kernel, signature, sizes, capability, num_warps=4, num_stages=3)
    assert compiled.stack_bytes == 0
    if dtype == "fp16" and capability == 90:
        assert "wgmma" in compiled.ptx
