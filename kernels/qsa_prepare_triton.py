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


@triton.constexpr_function
def _rest_features(dim: int, half: int) -> int:
    """Width of the piece that is not rotated: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim - 2 * half))


@triton.jit
def _pieces(D: tl.constexpr, HALF: tl.constexpr):
    """Features of a head in pieces ``[HALF]``, ``[HALF]`` and ``[REST]``, and which of ``REST`` exist.

    The rotary embedding pairs the first piece with the second and leaves the rest alone. Kept apart, no
    feature is loaded or computed twice, and none changes lanes.
    """
    o_half = tl.arange(0, HALF)
    o_rest = 2 * HALF + tl.arange(0, _rest_features(D, HALF))
    return o_half, HALF + o_half, o_rest, o_rest < D


@triton.jit
def _gains(p_weight, D: tl.constexpr, HALF: tl.constexpr):
    """One more than a norm's weights, FP32, in pieces."""
    o_first, o_second, o_rest, m_rest = _pieces(D, HALF)
    b_first, b_second = tl.load(p_weight + o_first), tl.load(p_weight + o_second)
    b_rest = tl.load(p_weight + o_rest, mask=m_rest, other=0.0)
    return 1.0 + b_first.to(tl.float32), 1.0 + b_second.to(tl.float32), 1.0 + b_rest.to(tl.float32)


@triton.jit
def _norm(b_first, b_second, b_rest, b_gain_first, b_gain_second, b_gain_rest, eps, D: tl.constexpr):
    """The pieces of a head after its norm; FP32."""
    square = tl.sum(b_first * b_first + b_second * b_second, 0) + tl.sum(b_rest * b_rest, 0)
    inverse = tl.rsqrt(square * (1.0 / D) + eps)  # D is a power of two, so 1 / D is exact
    return (
        b_first * inverse * b_gain_first,
        b_second * inverse * b_gain_second,
        b_rest * inverse * b_gain_rest,
    )


@triton.jit
def _rotate(b_first, b_second, p_angles, num_angles, position, live, HALF: tl.constexpr):
    """Rotary embedding of paired features ``[HALF]``; FP32.

    A position that the table does not have gives NaN.
    """
    p_angle = p_angles + position * (2 * HALF) + tl.arange(0, HALF)
    known = live & (position < num_angles)
    b_cos = tl.load(p_angle, mask=known, other=float("nan"))
    b_sin = tl.load(p_angle + HALF, mask=known, other=float("nan"))
    return b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin


@triton.jit
def _load_head(p_positions, p_head, row, stride, rows, D: tl.constexpr, HALF: tl.constexpr):
    """The position of a row, -1 past the last, and the pieces of a head as they are."""
    exists = row < rows
    p_head += row * stride
    o_first, o_second, o_rest, m_rest = _pieces(D, HALF)
    position = tl.load(p_positions + row, mask=exists, other=-1)
    b_first = tl.load(p_head + o_first, mask=exists, other=0.0)
    b_second = tl.load(p_head + o_second, mask=exists, other=0.0)
    return position, b_first, b_second, tl.load(p_head + o_rest, mask=exists & m_rest, other=0.0)


@triton.jit
def _norm_rope(
    b_first, b_second, b_rest, b_gain_first, b_gain_second, b_gain_rest, p_angles, num_angles, position, eps,
    D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of a head in pieces, each rounded to the activations' dtype."""
    dtype = b_first.dtype
    b_first, b_second, b_rest = _norm(
        b_first.to(tl.float32), b_second.to(tl.float32), b_rest.to(tl.float32),
        b_gain_first, b_gain_second, b_gain_rest, eps, D,
    )  # fmt: skip
    b_first, b_second = _rotate(
        b_first.to(dtype).to(tl.float32), b_second.to(dtype).to(tl.float32),
        p_angles, num_angles, position, position >= 0, HALF,
    )  # fmt: skip
    return b_first.to(dtype), b_second.to(dtype), b_rest.to(dtype)


@triton.jit
def _prepare_queries(
    p_positions, p_head, stride, p_weight, p_angles, num_angles, p_out, stride_out, first_row, rows, eps,
    D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of a query head of ROWS rows."""
    b_gain_first, b_gain_second, b_gain_rest = _gains(p_weight, D, HALF)
    position, b_first, b_second, b_rest = _load_head(p_positions, p_head, first_row, stride, rows, D, HALF)
    for i_row in range(ROWS):
        next_row = first_row + tl.minimum(i_row + 1, ROWS - 1)
        next_position, b_next_first, b_next_second, b_next_rest = _load_head(
            p_positions, p_head, next_row, stride, rows, D, HALF
        )  # fmt: skip
        b_first, b_second, b_rest = _norm_rope(
            b_first, b_second, b_rest, b_gain_first, b_gain_second, b_gain_rest,
            p_angles, num_angles, position, eps, D, HALF,
        )  # fmt: skip
        _store_head(
            p_out + (first_row + i_row) * stride_out, position >= 0, b_first, b_second, b_rest, D, HALF
        )
        position, b_first, b_second, b_rest = next_position, b_next_first, b_next_second, b_next_rest


@triton.jit
def _store_head(p_head, live, b_first, b_second, b_rest, D: tl.constexpr, HALF: tl.constexpr):
    """Store the pieces of a head."""
    o_first, o_second, o_rest, m_rest = _pieces(D, HALF)
    tl.store(p_head + o_first, b_first, mask=live)
    tl.store(p_head + o_second, b_second, mask=live)
    tl.store(p_head + o_rest, b_rest, mask=live & m_rest)


@triton.jit
def _page_slot(slot, i_head, HKV: tl.constexpr):
    """Which token of all pages' KV heads a slot is; 0 without a slot."""
    return tl.where(slot >= 0, (slot // _PAGE * HKV + i_head) * _PAGE + slot % _PAGE, 0)


@triton.jit
def _largest(b_x):
    """The bits of the largest magnitude."""
    return tl.max(magnitude_bits(b_x.to(tl.float32)), 0)


@triton.jit
def _store_k(
    b_first, b_second, b_rest, p_pages, p_scales, slot, i_head, scale,
    HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Encode the pieces of a K head into its page slot."""
    token = _page_slot(slot, i_head, HKV)
    if FORMAT == "int8":
        largest = tl.maximum(tl.maximum(_largest(b_first), _largest(b_second)), _largest(b_rest))
        scale = int8_scale(largest)
        tl.store(p_scales + token, scale, mask=slot >= 0)
    _store_head(
        p_pages + token * D, slot >= 0,
        encode(b_first.to(tl.float32), scale, FORMAT, NATIVE),
        encode(b_second.to(tl.float32), scale, FORMAT, NATIVE),
        encode(b_rest.to(tl.float32), scale, FORMAT, NATIVE),
        D, HALF,
    )  # fmt: skip


@triton.jit
def _store_v(
    b_v, p_pages, p_scales, slot, i_head, scale,
    HKV: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Encode a V head ``[D]`` into its page slot."""
    token = _page_slot(slot, i_head, HKV)
    if FORMAT == "int8":
        scale = int8_scale(_largest(b_v))
        tl.store(p_scales + token, scale, mask=slot >= 0)
    b_code = encode(b_v.to(tl.float32), scale, FORMAT, NATIVE)
    tl.store(p_pages + token * D + tl.arange(0, D), b_code, mask=slot >= 0)


@triton.jit
def _block_mean(
    p_raw, stride_raw, p_ring, o_feature, m_feature, row, index, ahead, position, request,
    DI: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """FP32 mean of some features of a block's raw keys; those before the step's rows come from the ring."""
    b_sum = tl.zeros(o_feature.shape, tl.float32)
    for i_member in tl.static_range(RATIO):
        offset = ahead + (i_member - (RATIO - 1))  # from the row to this member
        is_new = index + offset >= 0
        b_new = tl.load(p_raw + (row + offset) * stride_raw + o_feature, mask=is_new & m_feature, other=0.0)
        o_old = (request * RING + (position + offset) % RING) * DI
        b_old = tl.load(p_ring + o_old + o_feature, mask=(index + offset < 0) & m_feature, other=0.0)
        b_sum += tl.where(is_new, b_new.to(p_ring.dtype.element_ty), b_old).to(tl.float32)
    return b_sum * (1.0 / RATIO)  # exact: RATIO divides 16


@triton.jit
def _update_index_keys(
    p_raw, stride_raw, p_ring, p_compressed, p_block_tables, stride_block_tables,
    p_weight, p_angles, num_angles, row, position, request, index, count, eps,
    DI: tl.constexpr, HALF: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The compressed key of the block that a row answers for, then the ring of a request that begins here.

    Rows share no ring, so none can read what another overwrites: only a request's first row of the step
    touches its ring. That row answers for the block that was open before the step, the only one with keys in
    the ring, wherever its last key is; and it writes the ring for all rows of its request, after a barrier.
    Every other block lies within the rows and is answered for by its last row.
    """
    o_back = tl.arange(0, triton.next_power_of_2(RING))[:, None]
    o_ring_row, o_feature = count - 1 - o_back, tl.arange(0, DI)[None, :]  # newest first
    m_ring = (index == 0) & (o_back < RING) & (o_ring_row >= 0)
    b_raw = tl.load(p_raw + (row + o_ring_row) * stride_raw + o_feature, mask=m_ring, other=0.0)
    phase = position % RATIO
    to_last = RATIO - 1 - phase  # rows from here to the last one of the row's block
    opened = (index == 0) & (phase > 0) & (to_last < count)
    within = (index >= RATIO - 1) & (to_last == 0)
    if opened | within:
        ahead = tl.where(opened, to_last, 0)
        o_first, o_second, o_rest, m_rest = _pieces(DI, HALF)
        b_first = _block_mean(
            p_raw, stride_raw, p_ring, o_first, o_first < DI, row, index, ahead, position, request,
            DI, RATIO, RING,
        )  # fmt: skip
        b_second = _block_mean(
            p_raw, stride_raw, p_ring, o_second, o_second < DI, row, index, ahead, position, request,
            DI, RATIO, RING,
        )  # fmt: skip
        b_rest = _block_mean(
            p_raw, stride_raw, p_ring, o_rest, m_rest, row, index, ahead, position, request,
            DI, RATIO, RING,
        )  # fmt: skip
        b_gain_first, b_gain_second, b_gain_rest = _gains(p_weight, DI, HALF)
        b_first, b_second, b_rest = _norm(
            b_first, b_second, b_rest, b_gain_first, b_gain_second, b_gain_rest, eps, DI
        )  # fmt: skip
        block = (position + ahead) // RATIO
        b_first, b_second = _rotate(b_first, b_second, p_angles, num_angles, block * RATIO, True, HALF)
        PER_PAGE: tl.constexpr = _PAGE // RATIO
        page = tl.load(p_block_tables + request * stride_block_tables + block // PER_PAGE)
        dtype = p_compressed.dtype.element_ty
        _store_head(
            p_compressed + (page * PER_PAGE + block % PER_PAGE) * DI, page >= 0,
            b_first.to(dtype), b_second.to(dtype), b_rest.to(dtype), DI, HALF,
        )  # fmt: skip
    if index == 0:
        # Other threads of this program may still be reading the ring.
        tl.debug_barrier()
        o_ring = (request * RING + (position + o_ring_row) % RING) * DI
        tl.store(p_ring + o_ring + o_feature, b_raw.to(p_ring.dtype.element_ty), mask=m_ring)


@triton.jit(do_not_specialize=["rows", "num_angles"])
def qsa_prepare_kernel(
    p_q_gate, stride_q_gate, p_k, stride_k, p_v, stride_v, p_index, stride_index,
    p_q_norm, p_k_norm, p_index_q_norm, p_index_k_norm, p_angles, num_angles,
    p_positions, p_request, p_row_index, p_row_count, p_slots, p_block_tables, stride_block_tables,
    p_q, p_index_q, p_k_pages, p_v_pages, p_k_scales, p_v_scales, p_ring, p_compressed,
    k_scale, v_scale, eps, rows,
    HQ: tl.constexpr, HKV: tl.constexpr, HI: tl.constexpr, D: tl.constexpr, DI: tl.constexpr,
    HALF: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program handles one head of ROWS rows: the index key, an index query, a query, a key or a value.

    A row's numbers are loaded while those of the row before are computed.
    """
    start_dependent(DEPENDENT)
    i_role = tl.program_id(0)
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    if i_role == 0:
        for i_row in range(ROWS):
            row = first_row + i_row
            position = tl.load(p_positions + row, mask=row < rows, other=-1)
            request = tl.load(p_request + row, mask=row < rows, other=-1).to(tl.int64)
            index = tl.load(p_row_index + row, mask=row < rows, other=0)
            count = tl.load(p_row_count + row, mask=row < rows, other=0)
            if (position >= 0) & (request >= 0):
                _update_index_keys(
                    p_index + HI * DI, stride_index, p_ring, p_compressed, p_block_tables,
                    stride_block_tables, p_index_k_norm, p_angles, num_angles,
                    row, position, request, index, count, eps, DI, HALF, RATIO, RING,
                )  # fmt: skip
    elif i_role < 1 + HI:
        i_head = i_role - 1
        _prepare_queries(
            p_positions, p_index + i_head * DI, stride_index, p_index_q_norm, p_angles, num_angles,
            p_index_q + i_head * DI, HI * DI, first_row, rows, eps, DI, HALF, ROWS,
        )  # fmt: skip
    elif i_role < 1 + HI + HQ:
        i_head = i_role - (1 + HI)
        _prepare_queries(
            p_positions, p_q_gate + i_head * (2 * D), stride_q_gate, p_q_norm, p_angles, num_angles,
            p_q + i_head * D, HQ * D, first_row, rows, eps, D, HALF, ROWS,
        )  # fmt: skip
    elif i_role < 1 + HI + HQ + HKV:
        i_head = i_role - (1 + HI + HQ)
        b_gain_first, b_gain_second, b_gain_rest = _gains(p_k_norm, D, HALF)
        p_k += i_head * D
        position, b_first, b_second, b_rest = _load_head(
            p_positions, p_k, first_row, stride_k, rows, D, HALF
        )  # fmt: skip
        slot = tl.load(p_slots + first_row, mask=first_row < rows, other=-1)
        for i_row in range(ROWS):
            next_row = first_row + tl.minimum(i_row + 1, ROWS - 1)
            next_position, b_next_first, b_next_second, b_next_rest = _load_head(
                p_positions, p_k, next_row, stride_k, rows, D, HALF
            )  # fmt: skip
            next_slot = tl.load(p_slots + next_row, mask=next_row < rows, other=-1)
            b_first, b_second, b_rest = _norm_rope(
                b_first, b_second, b_rest, b_gain_first, b_gain_second, b_gain_rest,
                p_angles, num_angles, position, eps, D, HALF,
            )  # fmt: skip
            _store_k(
                b_first, b_second, b_rest, p_k_pages, p_k_scales, tl.where(position >= 0, slot, -1),
                i_head, k_scale, HKV, D, HALF, FORMAT, NATIVE,
            )  # fmt: skip
            position, slot = next_position, next_slot
            b_first, b_second, b_rest = b_next_first, b_next_second, b_next_rest
    else:
        i_head = i_role - (1 + HI + HQ + HKV)
        o_v = i_head * D + tl.arange(0, D)
        exists = first_row < rows
        position = tl.load(p_positions + first_row, mask=exists, other=-1)
        slot = tl.load(p_slots + first_row, mask=exists, other=-1)
        b_v = tl.load(p_v + first_row * stride_v + o_v, mask=exists, other=0.0)
        for i_row in range(ROWS):
            next_row = first_row + tl.minimum(i_row + 1, ROWS - 1)
            exists = next_row < rows
            next_position = tl.load(p_positions + next_row, mask=exists, other=-1)
            next_slot = tl.load(p_slots + next_row, mask=exists, other=-1)
            b_next_v = tl.load(p_v + next_row * stride_v + o_v, mask=exists, other=0.0)
            _store_v(
                b_v, p_v_pages, p_v_scales, tl.where(position >= 0, slot, -1), i_head, v_scale,
                HKV, D, FORMAT, NATIVE,
            )  # fmt: skip
            position, slot, b_v = next_position, next_slot, b_next_v


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


def default_prepare_config(num_rows: int, device: torch.device) -> PrepareConfig:
    """The configuration without tuning.

    A program is one warp and needs no shared memory for its sums. More rows have more bytes on their way, one
    row makes more programs. On a V100 (compute capability 7.0) one row also takes 64 registers, so that 32
    programs have room on a multiprocessor; two rows take 92, and spill in 64.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (7, 0):
        return PrepareConfig(rows_per_program=1)
    return PrepareConfig(rows_per_program=1 if num_rows <= 64 else 2 if num_rows < 2048 else 8)


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
        rows_per_program = default_prepare_config(num_rows, k.device).rows_per_program
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
        ROWS=rows_per_program,
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=1,
        # So 32 programs have room on a multiprocessor, the most that it takes.
        maxnreg=64 if dependent and rows_per_program >= 8 else None,
        enable_fp_fusion=False,  # a fused multiply-add would round the rotation differently
    )
    return q, index_q
