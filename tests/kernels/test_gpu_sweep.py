"""Every kernel at real sizes on a GPU: Gluon and plain Triton against float64, and the steps before them.

A kernel may be as wrong as plain operations in its working precision are, and one rounding more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from page4.kernels.block_plan import RowGroups, pack_plan
from page4.kernels.block_select import select_blocks, union_plan
from page4.kernels.block_select_triton import SelectionWorkspace, select_plan_triton
from page4.kernels.index_scores_triton import index_scores_triton
from page4.kernels.page4_attention_gluon import GLUON_FORMATS, page4_attention_gluon
from page4.kernels.page4_attention_triton import page4_attention_triton
from tests.kernels.attention_cases import FORMATS
from tests.kernels.prepare_cases import MODEL, play, poisoned_storage
from tests.kernels.sweep_cases import FACTORS, Shape, SweepCase, covering_shapes, pairs_of, sweep_case

GPU_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="the sweep needs a GPU")
TENSOR_CORES = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
SHAPES = covering_shapes()
# Of an output, relative to its size: half a last place of FP16; some roundings of FP32, which order decides.
EPSILON = {torch.float16: 2.0**-11, torch.float32: 2.0**-18}


def test_the_sweep_holds_every_pair_of_values() -> None:
    covered = set().union(*map(pairs_of, SHAPES))
    for a, b in combinations(FACTORS, 2):
        assert {((a, x), (b, y)) for x, y in product(FACTORS[a], FACTORS[b])} <= covered
    assert len(SHAPES) < 80


def check(case: SweepCase, attention: Callable[..., tuple[Tensor, Tensor]]) -> None:
    inputs, live = case.inputs, case.live_rows
    out = torch.full(inputs.q.shape, 7.0, dtype=inputs.q.dtype, device=inputs.q.device)
    lse = torch.full(inputs.q.shape[:2], 7.0, device=inputs.q.device)
    attention(inputs, out=out, lse=lse)
    assert (out[live:] == 7).all() and (lse[live:] == 7).all()  # padding groups write nothing
    torch.testing.assert_close(lse[:live].double(), case.expected_lse, rtol=1e-5, atol=2e-5)
    eager, _ = case.eager(inputs.q.dtype)
    for size in (lambda x: x.square().mean().sqrt(), lambda x: x.abs().max()):
        allowed = size(eager.double() - case.expected) + EPSILON[out.dtype] * size(case.expected)
        assert size(out[:live].double() - case.expected) <= allowed


@GPU_ONLY
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_as_exact_as_eager_operations(shape: Shape) -> None:
    case = sweep_case(shape)
    check(case, page4_attention_triton)
    if TENSOR_CORES and shape.kv_format in GLUON_FORMATS:
        check(case, page4_attention_gluon)


@GPU_ONLY
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("rows", [(9, 6), (90, 37)], ids=["few", "many"])
def test_rows_are_prepared_at_the_sizes_of_the_model(rows: tuple[int, int], kv_format: str) -> None:
    """A prompt of two requests and a verify step, with the tiles that the launcher chooses."""
    storage = poisoned_storage(kv_format, torch.float16, sizes=MODEL)
    steps = [[(1, 0, rows[0]), (0, 0, rows[1])], [(0, rows[1], 4), (1, rows[0], 4)]]
    play(steps, storage, torch.float16, rows_per_program=None, padding=2, sizes=MODEL)


@GPU_ONLY
@pytest.mark.parametrize(
    ("requests", "rows", "length"),
    [(1, 4, 32768), (4, 8, 8195), (16, 1, 32768), (16, 4, 2047), (1, 4, 262144)],
)
def test_scores_and_plans_at_real_lengths(requests: int, rows: int, length: int) -> None:
    """Scores against float64; the plan bit for bit that of the reference from the same scores."""
    heads, dim, topk = 4, 128, 512
    generator = torch.Generator("cuda").manual_seed(0)
    used, blocks = -(-length // 16), length // 4
    pages = torch.full((requests * used + 1, 4, dim), torch.nan, dtype=torch.float16, device="cuda")
    order = torch.randperm(len(pages), generator=generator, device="cuda")
    tables = order[: requests * used].view(requests, used)
    keys = torch.randn(requests, blocks, dim, generator=generator, device="cuda").half()
    block = torch.arange(blocks, device="cuda")
    pages[tables[:, block // 4], block % 4] = keys
    positions = torch.arange(length - rows, length, device="cuda").repeat(requests)
    queries = torch.randn(requests * rows, heads, dim, generator=generator, device="cuda").half()
    groups = RowGroups.of([rows] * requests, rows, groups=requests + 1, device="cuda")

    scores = torch.full((requests * rows, blocks + 1), torch.nan, device="cuda")
    index_scores_triton(queries, pages, tables, positions, groups, scores)
    visible = (positions + 1) // 4
    for request in range(requests):
        here = slice(request * rows, (request + 1) * rows)
        seen = torch.arange(blocks, device="cuda") < visible[here, None]

        def by_definition(dtype: torch.dtype, request: int = request, here: slice = here) -> Tensor:
            dots = (queries[here, head].to(dtype) @ keys[request].to(dtype).T for head in range(heads))
            return sum(dot.relu() for dot in dots) / math.sqrt(dim)

        exact = by_definition(torch.float64)
        eager_error = (by_definition(torch.float32) - exact)[seen].abs().max()
        error = (scores[here, :blocks].double() - exact)[seen].abs().max()
        assert error <= eager_error + EPSILON[torch.float32] * exact[seen].max()
        assert scores[here, :blocks][~seen].isnan().all()  # nothing is written there

    workspace = SelectionWorkspace.allocate(len(positions), -(-length // 4), topk, "cuda")
    plan = select_plan_triton(scores, positions, groups, workspace)
    selected = select_blocks(scores[:, :blocks].nan_to_num(0.0), visible, topk)
    wanted = pack_plan(union_plan(selected, positions, rows, requests=requests), len(positions), requests)
    assert plan.counts.tolist() == [*wanted.counts.tolist(), 0]
    for group, count in enumerate(wanted.counts.tolist()):
        assert torch.equal(plan.blocks[group, :count], wanted.blocks[group, :count])
        assert torch.equal(plan.masks[group, :count], wanted.masks[group, :count])
