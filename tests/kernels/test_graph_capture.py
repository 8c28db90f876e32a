"""A layer's launches in a CUDA graph: replayed on other inputs and fewer requests, they do as run eagerly.

During capture PyTorch must not be asked for memory, and nothing may wait for the GPU or copy from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from page4.kernels.block_plan import PackedPlan, RowGroups, plan_capacity
from page4.kernels.block_select_triton import SelectionWorkspace, empty_plan, select_plan_triton
from page4.kernels.codecs import BYTE_FLOATS, STORAGE_DTYPES
from page4.kernels.index_scores_triton import index_scores_triton
from page4.kernels.page4_attention_gluon import default_gluon_config, page4_attention_gluon
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import Partials
from page4.kernels.page4_attention_triton import default_config, page4_attention_triton
from page4.kernels.qsa_prepare_inputs import QSANorms, QSAStorage
from page4.kernels.qsa_prepare_triton import qsa_prepare_triton, rotary_table
from page4.kernels.step_rows import StepRows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
TENSOR_CORES = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
HEADS, KV_HEADS, DIM, INDEX_HEADS, INDEX_DIM, ROTARY_DIM = 24, 2, 256, 4, 128, 64
ROWS, REQUESTS, MAX_TOKENS, TOPK = 4, 4, 4096, 512
PAGES = MAX_TOKENS // 16
LENGTHS = [3001, 1298, 37, 2050]  # of the prompts
SPLITS = 4


@dataclass
class Layer:
    """All memory that a step of one layer touches; a captured graph holds on to it."""

    q_gate: Tensor
    k: Tensor
    v: Tensor
    index: Tensor
    rows: StepRows
    groups: RowGroups
    storage: QSAStorage
    norms: QSANorms
    angles: Tensor
    q: Tensor
    index_q: Tensor
    scores: Tensor
    selection: SelectionWorkspace
    plan: PackedPlan
    out: Tensor
    lse: Tensor

    def __post_init__(self) -> None:
        self.partials = Partials.empty(self.inputs(), SPLITS)

    def inputs(self) -> AttentionInputs:
        storage = self.storage
        return AttentionInputs(
            q=self.q,
            k_pages=storage.k_pages,
            v_pages=storage.v_pages,
            block_tables=self.rows.block_tables,
            plan=self.plan,
            rows_per_group=ROWS,
            kv_format=storage.kv_format,
            k_scale=storage.k_scale,
            v_scale=storage.v_scale,
            softmax_scale=DIM**-0.5,
            gate=self.q_gate[..., DIM:],
            k_token_scales=storage.k_scale_pages,
            v_token_scales=storage.v_scale_pages,
        )

    def prepare(self) -> None:
        qsa_prepare_triton(
            self.q_gate, self.k, self.v, self.index, self.norms, self.angles, self.rows, self.storage,
            q=self.q, index_q=self.index_q,
        )  # fmt: skip

    def score(self) -> None:
        rows, pages = self.rows, self.storage.compressed_pages
        index_scores_triton(self.index_q, pages, rows.block_tables, rows.positions, self.groups, self.scores)

    def select(self) -> None:
        select_plan_triton(self.scores, self.rows.positions, self.groups, self.selection, self.plan)

    def attend_gluon(self) -> None:
        inputs = self.inputs()
        config = replace(default_gluon_config(inputs, 132), splits=SPLITS)
        page4_attention_gluon(inputs, config, self.partials, self.out, self.lse)

    def attend_triton(self) -> None:
        inputs = self.inputs()
        config = replace(default_config(inputs, 132, TENSOR_CORES), splits=SPLITS)
        page4_attention_triton(inputs, config, self.partials, self.out, self.lse)

    def step(self, implementation: str) -> None:
        self.prepare()
        self.score()
        self.select()
        self.attend_gluon() if implementation == "gluon" else self.attend_triton()

    def read(self) -> dict[str, Tensor]:
        """What a step leaves behind, without what it leaves undefined."""
        listed = torch.arange(self.plan.blocks.shape[1], device="cuda") < self.plan.counts[:, None]
        storage = {f.name: getattr(self.storage, f.name) for f in fields(self.storage)}
        kept = {name: x for name, x in storage.items() if isinstance(x, Tensor)}
        return kept | {
            "out": self.out,
            "lse": self.lse,
            "counts": self.plan.counts,
            "blocks": self.plan.blocks.masked_fill(~listed, -1),
            "masks": self.plan.masks.masked_fill(~listed, 0),
        }


def decode_rows(requests: int, ahead: int, tables: Tensor) -> StepRows:
    """Verify rows of the first requests, some tokens after their prompts; the rest is padding."""
    starts = [length + ahead for length in LENGTHS[:requests]]
    return StepRows.of(starts, [ROWS] * requests, tables, rows=REQUESTS * ROWS)


def project(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").half()

    return (
        normal(rows, HEADS, 2 * DIM),
        normal(rows, KV_HEADS, DIM),
        normal(rows, KV_HEADS, DIM),
        normal(rows, (INDEX_HEADS + 1) * INDEX_DIM),
    )


def new_layer(kv_format: str) -> Layer:
    """Requests with their prompts in the cache, in permuted pages amid NaN."""
    generator = torch.Generator("cuda").manual_seed(0)
    pool = REQUESTS * PAGES + 3
    order = torch.randperm(pool, generator=generator, device="cuda")
    tables = order[: REQUESTS * PAGES].view(REQUESTS, PAGES).contiguous()
    dtype = STORAGE_DTYPES[kv_format]
    poison = 0xFF if dtype == torch.uint8 else torch.nan

    def poisoned(*size: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.full(size, poison if dtype == torch.uint8 else torch.nan, dtype=dtype, device="cuda")

    scale = 6.0 / BYTE_FLOATS[kv_format].max_value if kv_format in BYTE_FLOATS else 1.0
    token_scales = [
        poisoned(pool, KV_HEADS, 16, dtype=torch.float32) for _ in range(2 * (kv_format == "int8"))
    ]
    storage = QSAStorage(
        kv_format,
        poisoned(pool, KV_HEADS, 16, DIM, dtype=dtype),
        poisoned(pool, KV_HEADS, 16, DIM, dtype=dtype),
        ring=poisoned(REQUESTS, 8, INDEX_DIM),
        compressed_pages=poisoned(pool, 4, INDEX_DIM),
        k_scale=scale,
        v_scale=scale,
        k_scale_pages=token_scales[0] if token_scales else None,
        v_scale_pages=token_scales[1] if token_scales else None,
    )
    sizes = (DIM, DIM, INDEX_DIM, INDEX_DIM)
    norms = QSANorms(*(0.1 * torch.randn(n, generator=generator, device="cuda") for n in sizes))
    angles = rotary_table(MAX_TOKENS, ROTARY_DIM, 1e7, "cuda")
    prompt_rows = StepRows.of([0] * REQUESTS, LENGTHS, tables)
    qsa_prepare_triton(*project(sum(LENGTHS), 1), norms, angles, prompt_rows, storage)

    rows = REQUESTS * ROWS
    max_blocks = MAX_TOKENS // 4
    groups = RowGroups.of([ROWS] * REQUESTS, ROWS, device="cuda")
    q_gate, k, v, index = project(rows, 2)
    plan = empty_plan(groups, plan_capacity(ROWS, TOPK, max_blocks))
    layer = Layer(
        q_gate, k, v, index, decode_rows(REQUESTS, 0, tables), groups, storage, norms, angles,
        q=q_gate.new_zeros(rows, HEADS, DIM),
        index_q=q_gate.new_zeros(rows, INDEX_HEADS, INDEX_DIM),
        scores=torch.full((rows, max_blocks), torch.nan, device="cuda"),
        selection=SelectionWorkspace.allocate(rows, max_blocks, TOPK, "cuda", max_chunk=512),
        plan=plan,
        out=torch.full((rows, HEADS, DIM), 7.0, dtype=torch.float16, device="cuda"),
        lse=torch.full((rows, HEADS), 7.0, device="cuda"),
    )  # fmt: skip
    return layer


def change_inputs(layer: Layer, requests: int, ahead: int, seed: int) -> None:
    """Other rows in the same memory, as a server does between replays; padding rows hold NaN."""
    for old, new in zip((layer.q_gate, layer.k, layer.v, layer.index), project(16, seed), strict=True):
        old.copy_(new)
        old[requests * ROWS :] = torch.nan
    rows = decode_rows(requests, ahead, layer.rows.block_tables)
    groups = RowGroups.of([ROWS] * requests, ROWS, groups=REQUESTS, device="cuda")
    for old, new in ((layer.rows, rows), (layer.groups, groups)):
        for name, values in vars(old).items():
            if isinstance(values, Tensor) and name != "block_tables":
                values.copy_(getattr(new, name))
    layer.out.fill_(7.0)
    layer.lse.fill_(7.0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@contextmanager
def without_waiting() -> Iterator[None]:
    """PyTorch raises where it would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of launches that are compiled already, which asks PyTorch for no memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        launch()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    return graph


IMPLEMENTATIONS = ["triton", *(["gluon"] if TENSOR_CORES else [])]


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "int8"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_replay_equals_the_eager_step(implementation: str, kv_format: str) -> None:
    if implementation == "gluon" and kv_format == "int8":
        pytest.skip("the Gluon kernel does not read int8")
    layer = new_layer(kv_format)
    layer.step(implementation)  # compiles
    with without_waiting():
        layer.step(implementation)
    graph = capture(lambda: layer.step(implementation))
    for requests, ahead in ((4, 4), (3, 8), (1, 9), (4, 8)):
        change_inputs(layer, requests, ahead, seed=10 + ahead)
        before = {name: x.clone() for name, x in layer.read().items()}
        layer.step(implementation)
        eager = {name: x.clone() for name, x in layer.read().items()}
        for name, x in vars(layer.storage).items():
            if isinstance(x, Tensor):
                x.copy_(before[name])
        layer.out.copy_(before["out"])
        layer.lse.copy_(before["lse"])
        # Nothing that the eager step computed may help the replay.
        for x in (layer.q, layer.index_q, layer.scores, layer.partials.out, layer.partials.lse):
            x.fill_(torch.nan)
        for x in (layer.plan.blocks, layer.plan.masks, layer.plan.counts, layer.selection.bits):
            x.fill_(-1)
        graph.replay()
        replayed = layer.read()
        assert [name for name, x in eager.items() if not same_bits(x, replayed[name])] == []
        live = requests * ROWS
        assert layer.out[:live].isfinite().all() and layer.lse[:live].isfinite().all()
        assert (layer.out[live:] == 7).all() and (layer.lse[live:] == 7).all()
        assert layer.plan.counts[requests:].tolist() == [0] * (REQUESTS - requests)


@pytest.mark.parametrize(
    "launcher", ["prepare", "score", "select", "attend_triton", *(["attend_gluon"] if TENSOR_CORES else [])]
)
def test_every_launcher_can_be_captured(launcher: str) -> None:
    layer = new_layer("e4m3")
    layer.step("triton")
    launch: Callable[[], None] = getattr(layer, launcher)
    launch()  # compiles
    with without_waiting():
        launch()
    torch.cuda.synchronize()
    capture(launch).replay()
    torch.cuda.synchronize()
