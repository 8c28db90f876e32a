"""Inputs of the sparse-layer kernels at a given shape and overlap, for timing and tuning.

Values are random, everything else is as in a decoding step or a prefill: pages in random order, every row
with its own selected blocks, the tail block, plans packed as the kernels read them. Copies of a case do the
same work on pages of one pool that no other copy reads, so that a rotation through them finds cold caches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from page4.kernels.block_plan import BLOCK_TOKENS, MAX_GROUP_ROWS, PackedPlan, RowGroups, plan_capacity
from page4.kernels.block_select_triton import SelectionWorkspace, empty_plan
from page4.kernels.codecs import BYTE_FLOATS, INT8_MAX, STORAGE_DTYPES, check_kv_format, encode_kv
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.qsa_prepare import PAGE_TOKENS
from page4.kernels.qsa_prepare_inputs import QSANorms, QSAStorage
from page4.kernels.qsa_prepare_triton import rotary_table
from page4.kernels.step_rows import StepRows

INDEX_HEADS = 4
DRAFT_TOKENS = 3  # of the index-key ring
ROTARY_DIM, ROPE_THETA = 64, 1e7
_LARGEST = 6.0  # standard deviations that a calibrated scale covers
_SLAB_ELEMENTS = 2**26  # of the selection matrix that are worked on at once
# Pool values repeat with this odd period, so that no two pages of a pool hold the same bytes.
_PERIOD = 2**24 - 3


@dataclass(frozen=True)
class StepShape:
    """A step of equal requests.

    Attributes:
        requests: requests of the step.
        rows: query rows of each: K + 1 of a decoding request, or the tokens of a prompt.
        query_heads, kv_heads, head_dim: of attention.
        context: tokens of each request, this step's rows included.
        overlap: share of a row's selected blocks that all rows of its group select, 0..1. The others are
            different blocks for every row, as far as there are enough.
        kv_format: of K and V.
        index_dim: of index queries and compressed keys.
        topk: blocks that a row selects.

    Raises:
        InputError: a number below 1, more rows than context, an overlap outside 0..1, unknown format.
    """

    requests: int
    rows: int
    query_heads: int
    kv_heads: int
    context: int
    overlap: float
    kv_format: str
    head_dim: int = 256
    index_dim: int = 128
    topk: int = 512

    def __post_init__(self) -> None:
        """Refuse a shape that no step has."""
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if self.rows > self.context:
            raise InputError(f"{self.rows} rows do not fit into a context of {self.context} tokens")
        if not 0 <= self.overlap <= 1:
            raise InputError(f"overlap must lie in 0..1, got {self.overlap}")
        check_kv_format(self.kv_format)

    @classmethod
    def combinations(
        cls,
        kv_formats: Sequence[str],
        rows: Sequence[int],
        heads: Sequence[tuple[int, int]],
        requests: Sequence[int],
        *,
        context: int,
        overlap: float,
        head_dim: int,
        topk: int,
    ) -> list[StepShape]:
        """Every combination of formats, rows, heads (query, KV) and requests; requests change fastest.

        Raises:
            InputError: a shape that no step has.
        """
        return [
            cls(
                requests=count,
                rows=verified,
                query_heads=query_heads,
                kv_heads=kv_heads,
                context=context,
                overlap=overlap,
                kv_format=kv_format,
                head_dim=head_dim,
                topk=topk,
            )
            for kv_format, verified, (query_heads, kv_heads), count in itertools.product(
                kv_formats, rows, heads, requests
            )
        ]

    @property
    def rows_per_group(self) -> int:
        """Rows that share a list of blocks."""
        return min(self.rows, MAX_GROUP_ROWS)

    @property
    def total_rows(self) -> int:
        """N."""
        return self.requests * self.rows

    @property
    def pages(self) -> int:
        """Pages of one request."""
        return -(-self.context // PAGE_TOKENS)

    @property
    def max_blocks(self) -> int:
        """Blocks of one request, an incomplete last one included."""
        return -(-self.context // BLOCK_TOKENS)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all K and V pages of one copy, token scales included."""
        per_token = 2 * self.kv_heads * self.head_dim * STORAGE_DTYPES[self.kv_format].itemsize
        per_token += 8 * self.kv_heads if self.kv_format == "int8" else 0
        return self.requests * self.pages * PAGE_TOKENS * per_token


@dataclass(frozen=True)
class ScoreInputs:
    """One call of :func:`~page4.kernels.index_scores_triton.index_scores_triton`, in its order."""

    index_q: Tensor
    compressed_pages: Tensor
    block_tables: Tensor
    positions: Tensor
    groups: RowGroups
    scores: Tensor


@dataclass(frozen=True)
class SelectInputs:
    """One call of :func:`~page4.kernels.block_select_triton.select_plan_triton`, in its order."""

    scores: Tensor
    positions: Tensor
    groups: RowGroups
    workspace: SelectionWorkspace
    plan: PackedPlan


@dataclass(frozen=True)
class PrepareInputs:
    """One call of :func:`~page4.kernels.qsa_prepare_triton.qsa_prepare_triton`, in its order."""

    q_gate: Tensor
    k: Tensor
    v: Tensor
    index: Tensor
    norms: QSANorms
    angles: Tensor
    rows: StepRows
    storage: QSAStorage


def attention_inputs(shape: StepShape, device: torch.device | str, seed: int = 0) -> AttentionInputs:
    """One case of grouped attention; see :func:`attention_copies`."""
    return attention_copies(shape, device, seed)[0]


def attention_copies(
    shape: StepShape, device: torch.device | str, seed: int = 0, copies: int = 1
) -> list[AttentionInputs]:
    """Cases with one plan, each with its own queries, gates, lists and pages of a common pool.

    Queries are FP16, or FP32 where K and V are. Pages outside the block tables do not exist; tokens after the
    context do and are never visible.
    """
    generator = torch.Generator(device).manual_seed(seed)
    plan = packed_plan(shape, selected_blocks(shape, generator))
    tables = _block_tables(shape, copies, generator)
    pool = copies * shape.requests * shape.pages
    page = (pool, shape.kv_heads, PAGE_TOKENS)
    k_pages, v_pages = (_storage(shape, (*page, shape.head_dim), generator) for _ in range(2))
    scale = static_scale(shape.kv_format)
    token_scales: list[Tensor | None] = [None, None]
    if shape.kv_format == "int8":
        token_scales = [_uniform(page, generator) * (_LARGEST / INT8_MAX) + 1e-3 for _ in range(2)]
    dtype = torch.float32 if shape.kv_format == "fp32" else torch.float16
    made = []
    for block_tables in tables.unbind():
        both = _normal((shape.total_rows, shape.query_heads, 2 * shape.head_dim), generator, dtype)
        made.append(
            AttentionInputs(
                q=both[..., : shape.head_dim].contiguous(),
                k_pages=k_pages,
                v_pages=v_pages,
                block_tables=block_tables,
                plan=PackedPlan(**{name: values.clone() for name, values in vars(plan).items()}),
                rows_per_group=shape.rows_per_group,
                kv_format=shape.kv_format,
                k_scale=scale,
                v_scale=scale,
                softmax_scale=shape.head_dim**-0.5,
                gate=both[..., shape.head_dim :],  # the second half of a projection, as in the model
                k_token_scales=token_scales[0],
                v_token_scales=token_scales[1],
            )
        )
    return made


def score_copies(
    shape: StepShape, device: torch.device | str, seed: int = 0, copies: int = 1
) -> list[ScoreInputs]:
    """Cases of index scores over FP16 compressed keys; the scores are zeros."""
    generator = torch.Generator(device).manual_seed(seed)
    pool = copies * shape.requests * shape.pages
    per_page = PAGE_TOKENS // BLOCK_TOKENS
    compressed = torch.empty(pool, per_page, shape.index_dim, dtype=torch.float16, device=device)
    _fill(compressed, _normal((_PERIOD,), generator, torch.float16))
    query = (shape.total_rows, INDEX_HEADS, shape.index_dim)
    return [
        ScoreInputs(
            index_q=_normal(query, generator, torch.float16),
            compressed_pages=compressed,
            block_tables=block_tables,
            positions=_positions(shape, device),
            groups=_groups(shape, device),
            scores=torch.zeros(shape.total_rows, shape.max_blocks, device=device),
        )
        for block_tables in _block_tables(shape, copies, generator).unbind()
    ]


def select_copies(
    shape: StepShape, device: torch.device | str, seed: int = 0, copies: int = 1
) -> list[SelectInputs]:
    """Cases of selection and plan: scores whose top-k overlap as the shape asks.

    A row's scores are those of index queries and keys of independent normal numbers, up to their order: the
    selected blocks get the largest. Scores of invisible blocks are NaN: they must not count.
    """
    generator = torch.Generator(device).manual_seed(seed)
    scores = _scores(shape, selected_blocks(shape, generator), generator)
    groups = _groups(shape, device)
    capacity = plan_capacity(shape.rows_per_group, shape.topk, shape.max_blocks)
    return [
        SelectInputs(
            scores=scores.clone(),
            positions=_positions(shape, device),
            groups=replace(groups, start=groups.start.clone(), rows=groups.rows.clone()),
            workspace=SelectionWorkspace.allocate(shape.total_rows, shape.max_blocks, shape.topk, device),
            plan=empty_plan(groups, capacity),
        )
        for _ in range(copies)
    ]


def prepare_copies(
    shape: StepShape, device: torch.device | str, seed: int = 0, copies: int = 1
) -> list[PrepareInputs]:
    """Cases of the step between projections and attention; cache pages are zeros.

    Projections are FP16, or FP32 where K and V are.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float32 if shape.kv_format == "fp32" else torch.float16
    rows, dim, index_dim = shape.total_rows, shape.head_dim, shape.index_dim
    norms = QSANorms(*(0.1 * _normal((size,), generator, dtype) for size in (dim, dim, index_dim, index_dim)))
    angles = rotary_table(shape.context, min(ROTARY_DIM, dim, index_dim), ROPE_THETA, device)
    tables = _block_tables(shape, copies, generator)
    pool = copies * shape.requests * shape.pages
    page = (pool, shape.kv_heads, PAGE_TOKENS)
    k_pages, v_pages = (
        torch.zeros(*page, dim, dtype=STORAGE_DTYPES[shape.kv_format], device=device) for _ in range(2)
    )
    token_scales: list[Tensor | None] = [None, None]
    if shape.kv_format == "int8":
        token_scales = [torch.ones(page, device=device) for _ in range(2)]
    compressed = torch.zeros(pool, PAGE_TOKENS // BLOCK_TOKENS, index_dim, dtype=dtype, device=device)
    ring_rows = BLOCK_TOKENS * -(-(BLOCK_TOKENS + DRAFT_TOKENS) // BLOCK_TOKENS)
    scale = static_scale(shape.kv_format)
    start = shape.context - shape.rows
    made = []
    for block_tables in tables.unbind():
        ring = _normal((shape.requests, ring_rows, index_dim), generator, dtype)
        storage = QSAStorage(
            shape.kv_format,
            k_pages,
            v_pages,
            ring,
            compressed,
            scale,
            scale,
            token_scales[0],
            token_scales[1],
        )
        made.append(
            PrepareInputs(
                q_gate=_normal((rows, shape.query_heads, 2 * dim), generator, dtype),
                k=_normal((rows, shape.kv_heads, dim), generator, dtype),
                v=_normal((rows, shape.kv_heads, dim), generator, dtype),
                index=_normal((rows, (INDEX_HEADS + 1) * index_dim), generator, dtype),
                norms=norms,
                angles=angles,
                rows=StepRows.of([start] * shape.requests, [shape.rows] * shape.requests, block_tables),
                storage=storage,
            )
        )
    return made


def unique_bytes(inputs: AttentionInputs) -> int:
    """Bytes that attention cannot do without: each visible token's K and V once, q, gate, out and the lists.

    A token that several groups of a request see (in a prefill) counts once; int8 tokens count their scales.
    Synchronises with the device.
    """
    plan, q = inputs.plan, inputs.q
    listed = torch.arange(plan.blocks.shape[1], device=q.device) < plan.counts[:, None]  # [G, U]
    group, column = listed.nonzero(as_tuple=True)
    masks = plan.masks[group, column]
    blocks_per_table = inputs.block_tables.shape[1] * (PAGE_TOKENS // BLOCK_TOKENS)
    block = plan.group_request[group].long() * blocks_per_table + plan.blocks[group, column]
    names, entry = block.unique(return_inverse=True)
    seen = torch.zeros(len(names), BLOCK_TOKENS, dtype=torch.bool, device=q.device)
    for token in range(BLOCK_TOKENS):
        seen[entry[((masks >> token) & 0x11111111) != 0], token] = True
    per_head = 2 * inputs.head_dim * inputs.k_pages.element_size() + (8 if inputs.kv_format == "int8" else 0)
    read_or_written = 2 if inputs.gate is None else 3  # q, out, gate
    return (
        int(seen.sum()) * inputs.kv_heads * per_head
        + read_or_written * q.numel() * q.element_size()
        + 8 * int(plan.counts.sum())
    )


def selected_blocks(shape: StepShape, generator: torch.Generator) -> Tensor:
    """Which complete blocks each row selects, bool ``[N, max_blocks]``, on the generator's device.

    Row at position ``p`` selects ``min(topk, (p + 1) // 4)`` blocks, of which ``round(overlap * topk)`` are
    common to its group. The rest of each row are other blocks, visible to all of the group: different ones
    for each row while there are enough, else the rows share as few as possible.
    """
    device, size = generator.device, shape.rows_per_group
    visible = _visible(shape, device)  # [groups of a request, M]
    first = visible[:, :1]  # the first row's blocks are visible to the whole group
    common = first.clamp(max=round(shape.overlap * shape.topk))
    block = torch.arange(shape.max_blocks, device=device)
    member = torch.arange(size, device=device)[:, None]  # [M, 1]
    selected = []
    for _ in range(shape.requests):
        for part in _slabs(len(visible), size * shape.max_blocks):
            # A random order of the blocks, those that the first row cannot see behind all others.
            order = torch.rand(visible[part].shape[0], shape.max_blocks, generator=generator, device=device)
            order = torch.where(block < first[part], order, 2.0).argsort(dim=1, stable=True)
            place = torch.empty_like(order).scatter_(1, order, block.expand_as(order))  # [g, NB]
            others = (first - common)[part][..., None]  # [g, 1, 1] the blocks that rows need not share
            own = (shape.topk - common)[part][..., None]
            beyond = place[:, None] - common[part][..., None]  # [g, 1, NB] place among the others
            # Row m takes `own` of the others from place m * own on, around their end.
            turned = (beyond - member * own) % others.clamp(min=1)
            rank = torch.where((beyond >= 0) & (beyond < others), turned, beyond)  # [g, M, NB]
            chosen = visible[part].clamp(max=shape.topk)[..., None] - common[part][..., None]
            selected.append((rank < chosen) & (block < visible[part][..., None]))
    grouped = torch.cat(selected).view(shape.requests, -1, shape.max_blocks)
    return grouped[:, : shape.rows].reshape(-1, shape.max_blocks)


def packed_plan(shape: StepShape, selected: Tensor) -> PackedPlan:
    """The packed union plan of selected blocks ``[N, max_blocks]``: what selection would write.

    Lists have the capacity that a step of this shape allocates; block -1 and mask 0 pad them.
    """
    device, size = selected.device, shape.rows_per_group
    groups = _groups(shape, device)
    capacity = plan_capacity(size, shape.topk, shape.max_blocks)
    plan = empty_plan(groups, capacity)
    plan.blocks.fill_(-1)
    plan.masks.zero_()
    positions = _positions(shape, device)
    has_tail = (positions + 1) % BLOCK_TOKENS != 0
    reads = selected.clone()
    reads[has_tail.nonzero().squeeze(1), (positions[has_tail] + 1) // BLOCK_TOKENS] = True
    weights = 1 << torch.arange(BLOCK_TOKENS * size, device=device).view(size, BLOCK_TOKENS)  # int64
    rows = groups.start[:, None] + torch.arange(size, device=device)  # [G, M]
    present = torch.arange(size, device=device) < groups.rows[:, None]
    rows = torch.where(present, rows, 0)
    for part in _slabs(len(rows), size * shape.max_blocks):
        member = reads[rows[part]] & present[part][..., None]  # [g, M, NB]
        union = member.any(dim=1)
        counts = union.sum(dim=1)
        group, block = union.nonzero(as_tuple=True)  # by group, then ascending
        column = torch.arange(len(group), device=device) - (counts.cumsum(0) - counts)[group]
        token = block[:, None, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)
        reached = token <= positions[rows[part]][group][..., None]  # [n, M, 4]
        bits = reached & member[group, :, block][..., None]
        words = (bits * weights).sum(dim=(1, 2))
        plan.blocks[part][group, column] = block.int()
        plan.masks[part][group, column] = torch.where(words >= 2**31, words - 2**32, words).int()
        plan.counts[part] = counts.int()
    return plan


def _scores(shape: StepShape, selected: Tensor, generator: torch.Generator) -> Tensor:
    """FP32 ``[N, NB]`` whose largest visible scores are those of the selected blocks."""
    device = selected.device
    visible = ((_positions(shape, device) + 1) // BLOCK_TOKENS)[:, None]
    block = torch.arange(shape.max_blocks, device=device)
    scores = torch.empty(selected.shape, dtype=torch.float32, device=device)
    for part in _slabs(len(selected), INDEX_HEADS * shape.max_blocks):
        heads = _normal((*selected[part].shape, INDEX_HEADS), generator, torch.float32)
        values = heads.relu_().sum(dim=2)
        values = torch.where(block < visible[part], values, -1.0).sort(dim=1, descending=True).values
        # Selected blocks first, then the other visible ones, each in random order.
        key = torch.rand(values.shape, generator=generator, device=device) + selected[part].float()
        order = torch.where(block < visible[part], key, -1.0).argsort(dim=1, descending=True)
        placed = torch.empty_like(values).scatter_(1, order, values)
        # Many heads give scores of exactly 0; one that is selected must not tie with one that is not.
        scores[part] = torch.where(selected[part], placed.clamp(min=1e-30), placed)
    return torch.where(block < visible, scores, torch.nan)


def _positions(shape: StepShape, device: torch.device | str) -> Tensor:
    """int64 ``[N]``: every request's last rows."""
    return torch.arange(shape.context - shape.rows, shape.context, device=device).repeat(shape.requests)


def _visible(shape: StepShape, device: torch.device) -> Tensor:
    """Complete blocks that the rows of one request see, int64 ``[groups, M]``; 0 for missing rows."""
    groups = -(-shape.rows // shape.rows_per_group)
    visible = torch.zeros(groups * shape.rows_per_group, dtype=torch.int64, device=device)
    visible[: shape.rows] = (_positions(shape, device)[: shape.rows] + 1) // BLOCK_TOKENS
    return visible.view(groups, shape.rows_per_group)


def _groups(shape: StepShape, device: torch.device | str) -> RowGroups:
    return RowGroups.of([shape.rows] * shape.requests, shape.rows_per_group, device=device)


def _block_tables(shape: StepShape, copies: int, generator: torch.Generator) -> Tensor:
    """int64 ``[copies, requests, pages]``: every page of the pool once, in random order."""
    pool = copies * shape.requests * shape.pages
    pages = torch.randperm(pool, generator=generator, device=generator.device)
    return pages.view(copies, shape.requests, shape.pages)


def static_scale(kv_format: str) -> float:
    """The scale of K and V of a case: the format's largest value stands for 6 standard deviations."""
    return _LARGEST / BYTE_FLOATS[kv_format].max_value if kv_format in BYTE_FLOATS else 1.0


def _storage(shape: StepShape, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Pages of normal numbers in the format, exactly as the cache holds them."""
    pages = torch.empty(size, dtype=STORAGE_DTYPES[shape.kv_format], device=generator.device)
    values = _normal((min(_PERIOD, pages.numel()),), generator, torch.float32)
    if shape.kv_format == "int8":
        codes = (values * (INT8_MAX / _LARGEST)).round().clamp(-INT8_MAX, INT8_MAX)
        _fill(pages, codes.to(torch.int8).view(torch.uint8))
    else:
        _fill(pages, encode_kv(values, shape.kv_format, static_scale(shape.kv_format)))
    return pages


def _fill(target: Tensor, values: Tensor) -> None:
    """Fill a contiguous tensor with the values, over and over."""
    flat = target.view(-1)
    for start in range(0, len(flat), len(values)):
        part = flat[start : start + len(values)]
        part.copy_(values[: len(part)])


def _normal(size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=generator, device=generator.device, dtype=dtype)


def _uniform(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(size, generator=generator, device=generator.device)


def _slabs(rows: int, elements_per_row: int) -> Iterator[slice]:
    """Slices of rows that are worked on together, at least one row each."""
    size = max(1, _SLAB_ELEMENTS // max(1, elements_per_row))
    return (slice(start, start + size) for start in range(0, rows, size))
