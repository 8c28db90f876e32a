"""A step's rows for the tests of the prepare kernel, and what the references of its parts make of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from page4.kernels.codecs import BYTE_FLOATS, STORAGE_DTYPES, decode_kv
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


def assert_same(actual: Tensor, expected: Tensor, ulps: float) -> None:
    """Equal NaN, and numbers within some units of the dtype's last place."""
    assert torch.equal(actual.isnan(), expected.isnan())
    tolerance = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_stored(actual: Tensor, expected: Tensor, kv_format: str) -> None:
    """K may differ by one code, where the order of a sum decided a rounding; and that is rare."""
    if actual.dtype != torch.uint8:
        return assert_same(actual, expected, 4)

    def order(codes: Tensor) -> Tensor:
        if kv_format == "int8":
            return decode_kv(codes, "int8").int()
        magnitude = (codes & 0x7F).int()
        return torch.where(codes >= 0x80, -magnitude, magnitude)

    difference = (order(actual) - order(expected)).abs()
    assert difference.max() <= 1
    assert difference.float().mean() <= 0.002
    return None


def assert_same_storage(actual: QSAStorage, expected: QSAStorage) -> None:
    kv_format = actual.kv_format
    assert_stored(actual.k_pages, expected.k_pages, kv_format)
    assert torch.equal(actual.v_pages.nan_to_num(9.0), expected.v_pages.nan_to_num(9.0))
    assert torch.equal(actual.ring.nan_to_num(9.0), expected.ring.nan_to_num(9.0))
    assert_same(actual.compressed_pages, expected.compressed_pages, 4)
    if actual.k_scale_pages is not None:
        assert expected.k_scale_pages is not None and expected.v_scale_pages is not None
        assert actual.v_scale_pages is not None
        assert_same(actual.k_scale_pages, expected.k_scale_pages, 4)
        assert torch.equal(actual.v_scale_pages.nan_to_num(9.0), expected.v_scale_pages.nan_to_num(9.0))


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
    """Steps of ``(request, start, rows)`` by kernel and reference, each compared in full."""
    expected = copy_storage(storage)
    for number, segments in enumerate(steps):
        requests, starts, counts = (list(column) for column in zip(*segments, strict=True))
        lengths = [0] * REQUESTS
        for request, start, count in segments:
            lengths[request] = start + count
        rows = StepRows.of(starts, counts, block_tables(lengths), requests, sum(counts) + padding)
        step = Step.random(len(rows.positions), dtype, number, sizes)
        q, index_q = run(step, rows, storage, rows_per_program, sizes)
        expected_q, expected_index_q = reference(step, rows, expected, sizes)
        live = rows.positions >= 0
        assert_same(q[live], expected_q[live], 4)
        assert_same(index_q[live], expected_index_q[live], 4)
        assert_same_storage(storage, expected)
