"""A step's rows for the tests of the prepare kernel, and what the references of its parts make of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from page4.experiments.kernel_cases import PrepareInputs
from page4.experiments.prepare_exact import ExactPreparation
from page4.kernels.codecs import BYTE_FLOATS, STORAGE_DTYPES
from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred, rotary_cos_sin
from page4.kernels.qsa_prepare import update_index_keys, write_kv_pages
from page4.kernels.qsa_prepare_inputs import QSANorms, QSAStorage
from page4.kernels.qsa_prepare_triton import qsa_prepare_triton, rotary_table
from page4.kernels.step_rows import StepRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
THETA, POSITIONS = 1e4, 256
PAGES, PAGES_OF_EACH, REQUESTS = 40, 12, 3


@dataclass(frozen=True)
class Sizes:
    """Heads and dimensions of a layer."""

    heads: int = 2
    kv_heads: int = 2
    index_heads: int = 2
    dim: int = 32
    index_dim: int = 16
    rotary_dim: int = 8


SMALL, MODEL = Sizes(), Sizes(24, 2, 4, 256, 128, 64)


@dataclass
class Step:
    """Projections of a step's rows, as slices of wider tensors: no two have the same row stride."""

    q_gate: Tensor
    k: Tensor
    v: Tensor
    index: Tensor

    @classmethod
    def random(cls, rows: int, dtype: torch.dtype, seed: int, sizes: Sizes = SMALL) -> Step:
        q_width, kv_width = 2 * sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim
        widths = (q_width, kv_width, kv_width, (sizes.index_heads + 1) * sizes.index_dim)
        wide = torch.randn(rows, sum(widths), generator=torch.Generator().manual_seed(seed))
        q_gate, k, v, index = (3.0 * wide).to(DEVICE, dtype).split(widths, dim=1)
        return cls(
            q_gate.unflatten(1, (sizes.heads, 2 * sizes.dim)),
            k.unflatten(1, (sizes.kv_heads, sizes.dim)).clone(),
            v.unflatten(1, (sizes.kv_heads, sizes.dim)),
            index,
        )


def norms_of(sizes: Sizes) -> QSANorms:
    widths = (sizes.dim, sizes.dim, sizes.index_dim, sizes.index_dim)
    return QSANorms(
        *(
            0.3 * torch.randn(width, generator=torch.Generator().manual_seed(width + i)).to(DEVICE)
            for i, width in enumerate(widths)
        )
    )


def angles_of(sizes: Sizes) -> Tensor:
    return rotary_table(POSITIONS, sizes.rotary_dim, THETA, DEVICE)


def poisoned_storage(
    kv_format: str = "fp16",
    index_dtype: torch.dtype = torch.float32,
    capacity: int = 8,
    ratio: int = 4,
    sizes: Sizes = SMALL,
) -> QSAStorage:
    """Storage in which nothing may be read before it is written."""
    shape, dtype = (PAGES, sizes.kv_heads, 16, sizes.dim), STORAGE_DTYPES[kv_format]
    poison = 0xFF if dtype == torch.uint8 else math.nan
    scale = 0.02 if kv_format in BYTE_FLOATS else 1.0
    int8 = kv_format == "int8"
    index_shapes = (REQUESTS, capacity, sizes.index_dim), (PAGES, 16 // ratio, sizes.index_dim)
    ring, compressed = (torch.full(s, math.nan, dtype=index_dtype, device=DEVICE) for s in index_shapes)
    return QSAStorage(
        kv_format,
        torch.full(shape, poison, dtype=dtype, device=DEVICE),
        torch.full(shape, poison, dtype=dtype, device=DEVICE),
        ring,
        compressed,
        k_scale=scale,
        v_scale=1.5 * scale if scale != 1.0 else 1.0,
        k_scale_pages=torch.full(shape[:3], math.nan, device=DEVICE) if int8 else None,
        v_scale_pages=torch.full(shape[:3], math.nan, device=DEVICE) if int8 else None,
    )


def copy_storage(storage: QSAStorage) -> QSAStorage:
    tensors = {name: x.clone() for name, x in vars(storage).items() if isinstance(x, Tensor)}
    return replace(storage, **tensors)


def block_tables(lengths: list[int]) -> Tensor:
    """Shuffled pages; entries that the lengths do not need point nowhere."""
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3))[: REQUESTS * PAGES_OF_EACH]
    tables = pages.view(REQUESTS, PAGES_OF_EACH).clone()
    for request, length in enumerate(lengths):
        tables[request, -(-length // 16) :] = 10**9
    return tables.to(DEVICE)


def reference(step: Step, rows: StepRows, storage: QSAStorage, sizes: Sizes = SMALL) -> tuple[Tensor, Tensor]:
    """What the launch shall do, from the references of its parts; storage is written in place."""
    norms = norms_of(sizes)
    live = rows.positions >= 0
    cos, sin = rotary_cos_sin(rows.positions.clamp_min(0), sizes.rotary_dim, THETA)
    q = apply_rope(rms_norm_zero_centred(step.q_gate[..., : sizes.dim], norms.q), cos, sin)
    k = apply_rope(rms_norm_zero_centred(step.k, norms.k), cos, sin)
    index = step.index.unflatten(1, (-1, sizes.index_dim))
    index_q = apply_rope(rms_norm_zero_centred(index[:, :-1], norms.index_q), cos, sin)
    for values, pages, scales, scale in (
        (k, storage.k_pages, storage.k_scale_pages, storage.k_scale),
        (step.v, storage.v_pages, storage.v_scale_pages, storage.v_scale),
    ):
        write_kv_pages(values, pages, rows.slots, storage.kv_format, scale, scales)
    for request in rows.request[live].unique().tolist():
        mine = rows.request == request
        update_index_keys(
            index[mine, -1][None],
            rows.positions[mine][None],
            storage.ring,
            torch.tensor([request], device=DEVICE),
            storage.compressed_pages,
            rows.block_tables[request][None],
            norms.index_k,
            sizes.rotary_dim,
            THETA,
        )
    return q, index_q


def assert_nothing_else_written(storage: QSAStorage, before: QSAStorage, exact: ExactPreparation) -> None:
    """Outside the rows' slots, the completed blocks and the requests' rings, every bit is as before."""
    after = copy_storage(storage)
    page, offset = exact.slots // 16, exact.slots % 16
    for name in ("k_pages", "v_pages", "k_scale_pages", "v_scale_pages"):
        pages = getattr(after, name)
        if pages is not None:
            pages[page, :, offset] = getattr(before, name)[page, :, offset]
    page, place = exact.blocks.unbind(1)
    after.compressed_pages[page, place] = before.compressed_pages[page, place]
    after.ring[exact.requests] = before.ring[exact.requests]
    for name, x in vars(after).items():
        if isinstance(x, Tensor):
            assert torch.equal(x.nan_to_num(9.0), getattr(before, name).nan_to_num(9.0)), name


def run(
    step: Step,
    rows: StepRows,
    storage: QSAStorage,
    rows_per_program: int | None = None,
    sizes: Sizes = SMALL,
) -> tuple[Tensor, Tensor]:
    return qsa_prepare_triton(
        step.q_gate, step.k, step.v, step.index, norms_of(sizes), angles_of(sizes), rows, storage,
        rows_per_program=rows_per_program,
    )  # fmt: skip


def play(
    steps: list[list[tuple[int, int, int]]],
    storage: QSAStorage,
    dtype: torch.dtype = torch.float32,
    rows_per_program: int | None = 8,
    padding: int = 0,
    sizes: Sizes = SMALL,
) -> None:
    """Steps of ``(request, start, rows)``, each compared in full with what it must write."""
    for number, segments in enumerate(steps):
        requests, starts, counts = (list(column) for column in zip(*segments, strict=True))
        lengths = [0] * REQUESTS
        for request, start, count in segments:
            lengths[request] = start + count
        rows = StepRows.of(starts, counts, block_tables(lengths), requests, sum(counts) + padding)
        step = Step.random(len(rows.positions), dtype, number, sizes)
        inputs = PrepareInputs(
            **vars(step), norms=norms_of(sizes), angles=angles_of(sizes), rows=rows, storage=storage
        )
        exact, before = ExactPreparation.of(inputs, requests), copy_storage(storage)
        q, index_q = run(step, rows, storage, rows_per_program, sizes)
        shares = exact.shares(inputs, q, index_q)
        assert max(shares.values()) <= 1, shares
        assert_nothing_else_written(storage, before, exact)
