"""One launch between the projections of a sparse-attention layer and its attention.

Each row's heads are normalised and rotated, K and V are encoded into their page slots, the raw index key goes
to its ring, and every block that the step completes gets its compressed index key. The definitions are those
of :mod:`page4.kernels.norm_rope`, :mod:`page4.kernels.codecs` and :mod:`page4.kernels.qsa_prepare`.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.codecs_triton import encode, has_native_fp8, int8_scale, magnitude_bits
from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError
from page4.kernels.norm_rope import rotary_cos_sin
from page4.kernels.qsa_prepare import PAGE_TOKENS
from page4.kernels.qsa_prepare_inputs import QSANorms, QSAStorage, check_inputs
from page4.kernels.step_rows import StepRows

_PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def _features(D: tl.constexpr, HALF: tl.constexpr):
    """Features of a head as ``[1, D / HALF, HALF]``: the rotary embedding pairs block 0 with block 1."""
    o_block, o_half = tl.arange(0, D // HALF), tl.arange(0, HALF)
    return (o_block[:, None] * HALF + o_half[None, :])[None, :, :]


@triton.jit
def _paired_features(D: tl.constexpr, HALF: tl.constexpr):
    """The feature that each one is rotated with (of the first two blocks; others have no partner)."""
    o_block, o_half = tl.arange(0, D // HALF), tl.arange(0, HALF)
    return ((o_block ^ 1)[:, None] * HALF + o_half[None, :])[None, :, :]


@triton.jit
def _inverse_rms(b_x, eps, D: tl.constexpr):
    """``rsqrt(mean(x^2) + eps)`` of every row, ``[BM, D / HALF, HALF] -> [BM, 1, 1]``."""
    b_sum = tl.sum(tl.sum(b_x * b_x, 2), 1)  # [BM]
    return tl.rsqrt(b_sum * (1.0 / D) + eps)[:, None, None]  # D is a power of two, so 1 / D is exact


@triton.jit
def _gain(p_weight, o_feature):
    return 1.0 + tl.load(p_weight + o_feature).to(tl.float32)


@triton.jit
def _rotate(b_x, b_pair, p_angles, num_angles, b_position, m_row, D: tl.constexpr, HALF: tl.constexpr):
    """Rotary embedding of rows ``[BM, D / HALF, HALF]``, given each feature's partner; FP32.

    A position that the table does not have gives NaN.
    """
    o_block, o_half = tl.arange(0, D // HALF), tl.arange(0, HALF)
    m_angle = (m_row & (b_position < num_angles))[:, None]
    o_angle = b_position[:, None] * (2 * HALF) + o_half[None, :]  # [BM, HALF]
    b_cos = tl.load(p_angles + o_angle, mask=m_angle, other=float("nan"))[:, None, :]
    b_sin = tl.load(p_angles + o_angle + HALF, mask=m_angle, other=float("nan"))[:, None, :]
    b_turned = b_x * b_cos + tl.where(o_block == 0, -1.0, 1.0)[None, :, None] * b_pair * b_sin
    return tl.where((o_block < 2)[None, :, None], b_turned, b_x)


@triton.jit
def _norm_rope(
    p_head, o_row, p_weight, p_angles, num_angles, b_position, m_row, eps, D: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Norm and rotation of one head of BM rows, each rounded to the activations' dtype."""
    o_feature, o_pair = _features(D, HALF), _paired_features(D, HALF)
    p_row = p_head + o_row[:, None, None]
    b_x = tl.load(p_row + o_feature, mask=m_row[:, None, None], other=0.0).to(tl.float32)
    m_pair = m_row[:, None, None] & (o_feature < 2 * HALF)
    b_pair = tl.load(p_row + o_pair, mask=m_pair, other=0.0).to(tl.float32)  # from the L1 cache
    b_inverse = _inverse_rms(b_x, eps, D)
    b_x = (b_x * b_inverse * _gain(p_weight, o_feature)).to(p_head.dtype.element_ty).to(tl.float32)
    b_pair = (b_pair * b_inverse * _gain(p_weight, o_pair)).to(p_head.dtype.element_ty).to(tl.float32)
    b_rotated = _rotate(b_x, b_pair, p_angles, num_angles, b_position, m_row, D, HALF)
    return b_rotated.to(p_head.dtype.element_ty)


@triton.jit
def _store_kv(
    b_x, p_pages, p_scales, b_slot, i_head, scale, BM: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Encode one head of BM rows into its page slots."""
    m_slot = b_slot >= 0
    b_slot = tl.where(m_slot, b_slot, 0)
    o_slot = (b_slot // _PAGE * HKV + i_head) * _PAGE + b_slot % _PAGE  # [BM] int64
    b_x = b_x.to(tl.float32)
    if FORMAT == "int8":
        b_scale = int8_scale(tl.max(tl.max(magnitude_bits(b_x), 2), 1))  # [BM]
        tl.store(p_scales + o_slot, b_scale, mask=m_slot)
        b_code = encode(b_x, b_scale[:, None, None], FORMAT)
    else:
        b_code = encode(b_x, scale, FORMAT, NATIVE)
    tl.store(p_pages + o_slot[:, None, None] * D + _features(D, HALF), b_code, mask=m_slot[:, None, None])


@triton.jit
def _block_mean(
    p_raw, stride_raw, p_ring, o_row, o_feature, b_index, b_ahead, b_position, b_request, m_block,
    DI: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """FP32 mean of the raw keys of each row's block; those before the step's rows come from the ring."""
    for i_member in tl.static_range(RATIO):
        b_offset = b_ahead + (i_member - (RATIO - 1))  # [BM] from the row to this member
        m_new = b_index + b_offset >= 0
        o_new = (o_row + b_offset) * stride_raw
        b_new = tl.load(
            p_raw + o_new[:, None, None] + o_feature, mask=(m_block & m_new)[:, None, None], other=0.0
        )
        o_old = (b_request * RING + (b_position + b_offset) % RING) * DI
        b_old = tl.load(
            p_ring + o_old[:, None, None] + o_feature, mask=(m_block & ~m_new)[:, None, None], other=0.0
        )
        b_key = tl.where(m_new[:, None, None], b_new.to(p_ring.dtype.element_ty), b_old).to(tl.float32)
        if i_member == 0:
            b_sum = b_key
        else:
            b_sum += b_key
    return b_sum * (1.0 / RATIO)  # exact: RATIO divides 16


@triton.jit
def _update_index_keys(
    p_raw, stride_raw, p_ring, p_compressed, p_block_tables, stride_block_tables,
    p_weight, p_angles, num_angles, o_row, b_position, b_request, b_index, b_count, m_row, eps,
    DI: tl.constexpr, HALF: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Compressed keys of the blocks that BM rows answer for, then the rings of requests that begin here.

    Programs share no ring, so none can read what another overwrites: only the program that holds a request's
    first row of the step touches its ring. That row answers for the block that was open before the step, the
    only one with keys in the ring, wherever its last key is; and it writes the ring for all rows of its
    request, after a barrier. Every other block lies within the rows and is answered for by its last row.
    """
    b_phase = b_position % RATIO
    b_to_last = RATIO - 1 - b_phase  # rows from here to the last one of the row's block
    m_first = m_row & (b_index == 0)
    m_opened = m_first & (b_phase > 0) & (b_to_last < b_count)
    m_within = m_row & (b_index >= RATIO - 1) & (b_to_last == 0)
    m_block = m_opened | m_within
    b_ahead = tl.where(m_opened, b_to_last, 0)
    o_feature, o_pair = _features(DI, HALF), _paired_features(DI, HALF)
    if tl.max(m_block.to(tl.int32), 0) > 0:
        b_mean = _block_mean(
            p_raw, stride_raw, p_ring, o_row, o_feature, b_index, b_ahead, b_position, b_request, m_block,
            DI, RATIO, RING,
        )  # fmt: skip
        b_pair = _block_mean(
            p_raw, stride_raw, p_ring, o_row, o_pair, b_index, b_ahead, b_position, b_request, m_block,
            DI, RATIO, RING,
        )  # fmt: skip
        b_inverse = _inverse_rms(b_mean, eps, DI)
        b_mean = b_mean * b_inverse * _gain(p_weight, o_feature)
        b_pair = b_pair * b_inverse * _gain(p_weight, o_pair)
        b_block = (b_position + b_ahead) // RATIO
        b_key = _rotate(b_mean, b_pair, p_angles, num_angles, b_block * RATIO, m_block, DI, HALF)
        PER_PAGE: tl.constexpr = _PAGE // RATIO
        o_table = b_request * stride_block_tables + b_block // PER_PAGE
        b_page = tl.load(p_block_tables + o_table, mask=m_block, other=-1)
        o_key = (b_page * PER_PAGE + b_block % PER_PAGE) * DI
        b_key = b_key.to(p_compressed.dtype.element_ty)
        tl.store(p_compressed + o_key[:, None, None] + o_feature, b_key, mask=(b_page >= 0)[:, None, None])
    if tl.max(m_first.to(tl.int32), 0) > 0:
        # Other threads of this program may still be reading the ring.
        tl.debug_barrier()
        for i_back in range(RING):
            b_offset = b_count - 1 - i_back  # the newest RING rows, newest first
            m_write = (m_first & (b_offset >= 0))[:, None, None]
            o_new = (o_row + b_offset) * stride_raw
            b_raw = tl.load(p_raw + o_new[:, None, None] + o_feature, mask=m_write, other=0.0)
            o_ring = (b_request * RING + (b_position + b_offset) % RING) * DI
            tl.store(
                p_ring + o_ring[:, None, None] + o_feature, b_raw.to(p_ring.dtype.element_ty), mask=m_write
            )


@triton.jit(do_not_specialize=["rows", "num_angles"])
def qsa_prepare_kernel(
    p_q_gate, stride_q_gate, p_k, stride_k, p_v, stride_v, p_index, stride_index,
    p_q_norm, p_k_norm, p_index_q_norm, p_index_k_norm, p_angles, num_angles,
    p_positions, p_request, p_row_index, p_row_count, p_slots, p_block_tables, stride_block_tables,
    p_q, p_index_q, p_k_pages, p_v_pages, p_k_scales, p_v_scales, p_ring, p_compressed,
    k_scale, v_scale, eps, rows,
    HQ: tl.constexpr, HKV: tl.constexpr, HI: tl.constexpr, D: tl.constexpr, DI: tl.constexpr,
    HALF: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    BM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program handles one head of BM rows: the index key, an index query, a query, a key or a value."""
    start_dependent(DEPENDENT)
    i_role = tl.program_id(0)
    o_row = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)  # [BM]
    m_row = o_row < rows
    b_position = tl.load(p_positions + o_row, mask=m_row, other=-1)
    m_row &= b_position >= 0
    if i_role == 0:
        b_request = tl.load(p_request + o_row, mask=m_row, other=-1).to(tl.int64)
        b_index = tl.load(p_row_index + o_row, mask=m_row, other=0)
        b_count = tl.load(p_row_count + o_row, mask=m_row, other=0)
        _update_index_keys(
            p_index + HI * DI, stride_index, p_ring, p_compressed, p_block_tables, stride_block_tables,
            p_index_k_norm, p_angles, num_angles,
            o_row, b_position, b_request, b_index, b_count, m_row & (b_request >= 0), eps,
            DI, HALF, RATIO, RING,
        )  # fmt: skip
    elif i_role < 1 + HI:
        i_head = i_role - 1
        b_q = _norm_rope(
            p_index + i_head * DI, o_row * stride_index, p_index_q_norm, p_angles, num_angles,
            b_position, m_row, eps, DI, HALF,
        )  # fmt: skip
        o_q = (o_row * HI + i_head)[:, None, None] * DI + _features(DI, HALF)
        tl.store(p_index_q + o_q, b_q, mask=m_row[:, None, None])
    elif i_role < 1 + HI + HQ:
        i_head = i_role - (1 + HI)
        b_q = _norm_rope(
            p_q_gate + i_head * (2 * D), o_row * stride_q_gate, p_q_norm, p_angles, num_angles,
            b_position, m_row, eps, D, HALF,
        )  # fmt: skip
        o_q = (o_row * HQ + i_head)[:, None, None] * D + _features(D, HALF)
        tl.store(p_q + o_q, b_q, mask=m_row[:, None, None])
    else:
        b_slot = tl.load(p_slots + o_row, mask=m_row, other=-1)
        if i_role < 1 + HI + HQ + HKV:
            i_head = i_role - (1 + HI + HQ)
            b_k = _norm_rope(
                p_k + i_head * D, o_row * stride_k, p_k_norm, p_angles, num_angles,
                b_position, m_row, eps, D, HALF,
            )  # fmt: skip
            _store_kv(b_k, p_k_pages, p_k_scales, b_slot, i_head, k_scale, BM, HKV, D, HALF, FORMAT, NATIVE)
        else:
            i_head = i_role - (1 + HI + HQ + HKV)
            o_v = (o_row * stride_v)[:, None, None] + i_head * D + _features(D, HALF)
            b_v = tl.load(p_v + o_v, mask=m_row[:, None, None], other=0.0)
            _store_kv(b_v, p_v_pages, p_v_scales, b_slot, i_head, v_scale, BM, HKV, D, HALF, FORMAT, NATIVE)


def rotary_table(
    num_positions: int, rotary_dim: int, theta: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Cosines then sines of every position, FP32 ``[num_positions, rotary_dim]``.

    The entries are those of :func:`page4.kernels.norm_rope.rotary_cos_sin`: near position 2^18 an angle
    computed in a kernel needs a slow argument reduction, and would not agree to the last bit.
    """
    cos, sin = rotary_cos_sin(torch.arange(num_positions, device=device), rotary_dim, theta)
    half = rotary_dim // 2
    return torch.cat((cos[:, :half], sin[:, :half]), dim=1)


@dataclass(frozen=True)
class PrepareConfig:
    """How a call is cut into programs: ``rows_per_program`` rows of one head each, a power of two."""

    rows_per_program: int


def default_prepare_config(num_rows: int) -> PrepareConfig:
    """The configuration without tuning.

    Programs of one warp need no shared memory for their sums and layouts; two rows give every thread loads of
    16 bytes, one row more programs.
    """
    return PrepareConfig(rows_per_program=1 if num_rows <= 64 else 2)


def qsa_prepare_triton(
    q_gate: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    norms: QSANorms,
    angles: Tensor,
    rows: StepRows,
    storage: QSAStorage,
    eps: float = 1e-6,
    q: Tensor | None = None,
    index_q: Tensor | None = None,
    rows_per_program: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Prepare a step's rows for attention in one launch; see the module.

    Results are those of the reference up to the order of the sums of squares, so a value may differ in its
    last place; codes then differ by one where that decides a rounding. V, the ring and int8 scales of V are
    equal bit for bit.

    Shapes: ``q_gate`` ``[N, Hq, 2 D]`` (per head the query, then the gate, which is not read), ``k`` and
    ``v`` ``[N, Hkv, D]``, ``index`` ``[N, (Hi + 1) Di]`` (index queries, then the raw key), all in one dtype
    with rows of any stride; ``angles`` FP32 ``[positions, rotary_dim]`` of :func:`rotary_table`, with a row
    for every position. Returns ``q`` ``[N, Hq, D]`` and ``index_q`` ``[N, Hi, Di]`` in that dtype, written to
    the buffers given, if any; padding rows are left as they are. ``rows_per_program`` is a power of two.

    Raises:
        InputError: shapes, dtypes or strides that disagree, dimensions that are no powers of two, an unknown
            format, or a scale that the format refuses.
    """
    check_inputs(q_gate, k, v, index, norms, angles, rows, storage)
    num_rows, heads, kv_heads, dim = q_gate.shape[0], q_gate.shape[1], k.shape[1], k.shape[2]
    index_dim = storage.ring.shape[2]
    index_heads = index.shape[1] // index_dim - 1
    ratio = PAGE_TOKENS // storage.compressed_pages.shape[1]
    if q is None:
        q = q_gate.new_empty(num_rows, heads, dim)
    if index_q is None:
        index_q = q_gate.new_empty(num_rows, index_heads, index_dim)
    for name, out, shape in (
        ("q", q, (num_rows, heads, dim)),
        ("index_q", index_q, (num_rows, index_heads, index_dim)),
    ):
        if out.shape != shape or out.dtype != q_gate.dtype or not out.is_contiguous():
            raise InputError(f"{name} must be contiguous {q_gate.dtype} {list(shape)}, got {list(out.shape)}")
    if num_rows == 0:
        return q, index_q
    if rows_per_program is None:
        rows_per_program = default_prepare_config(num_rows).rows_per_program
    grid = (1 + index_heads + heads + 2 * kv_heads, triton.cdiv(num_rows, rows_per_program))
    dependent = launches_dependents(k.device)
    qsa_prepare_kernel[grid](
        q_gate,
        q_gate.stride(0),
        k,
        k.stride(0),
        v,
        v.stride(0),
        index,
        index.stride(0),
        norms.q,
        norms.k,
        norms.index_q,
        norms.index_k,
        angles,
        angles.shape[0],
        rows.positions,
        rows.request,
        rows.index,
        rows.count,
        rows.slots,
        rows.block_tables,
        rows.block_tables.stride(0),
        q,
        index_q,
        storage.k_pages,
        storage.v_pages,
        storage.k_scale_pages,
        storage.v_scale_pages,
        storage.ring,
        storage.compressed_pages,
        storage.k_scale,
        storage.v_scale,
        eps,
        num_rows,
        HQ=heads,
        HKV=kv_heads,
        HI=index_heads,
        D=dim,
        DI=index_dim,
        HALF=angles.shape[1] // 2,
        RATIO=ratio,
        RING=storage.ring.shape[1],
        FORMAT=storage.kv_format,
        NATIVE=has_native_fp8(k.device),
        BM=rows_per_program,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=max(1, rows_per_program // 2),
        enable_fp_fusion=False,  # a fused multiply-add would round the rotation differently
    )
    return q, index_q
