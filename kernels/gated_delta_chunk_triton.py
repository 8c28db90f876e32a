"""The gated delta rule over chunks of a prompt's rows, in matrix products: the WY form.

Formula, per value head and chunk, with q and k convolved, activated and normalised, v convolved and
activated, ``c_i`` the sum of the log decays up to row i, ``D_ij = exp(c_i - c_j)`` for ``j <= i``, and ``S``
the state before the chunk::

    T  = (I + strict_lower(beta_i D_ij k_i.k_j))^-1 diag(beta)
    U  = T (V - exp(c) K S)
    O  = exp(c) Q S + lower(D_ij q_i.k_j) U
    S' = exp(c_last) S + K^T (exp(c_last - c) U)

One launch each: the convolution; products of queries and keys, by chunk and key head; gates and T, by chunk
and value head; the chunks one after another, where a program advances some columns of a head's state; norm
and gate. One more keeps the convolution's inputs, where the ring has no room beside those that are read.

Chunks are counted from a request's first row of the step. Pieces of a prompt whose lengths are multiples of
:data:`CHUNK` therefore leave the bits of the whole, also where the last is shorter; other pieces round
otherwise. Nothing depends on the batch.

Source: Yang et al., Gated Delta Networks (2024), section 3.3.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.causal_conv_triton import causal_conv_triton, request_rows
from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError
from page4.kernels.gated_delta import L2_NORM_EPS
from page4.kernels.gated_delta_triton import (
    DeltaInputs,
    DeltaWeights,
    checked_key_heads,
    checked_out,
    decay_and_beta,
    decay_rate,
)
from page4.kernels.recurrent_rows import RequestRows

CHUNK = 64
"""Rows of a chunk."""

# Dimensions of keys that are multiplied at a time: the more, the more registers.
_KEYS_PART, _STATE_PART = 16, 32
_KEYS_WARPS, _SOLVE_WARPS = 8, 4

_L2_EPS = tl.constexpr(L2_NORM_EPS)
_NORM_ROWS = 32  # of a program that normalises
# Three products of TF32 parts: an error of 2^-21 of the factors' magnitudes, where one product has 2^-11.
_PRECISION = tl.constexpr("tf32x3")


@dataclass(frozen=True)
class ChunkConfig:
    """How the launch over a request's chunks is cut into programs; never chosen by the batch.

    Attributes:
        columns: of a head's state ``[Dk, Dv]`` that one program keeps, a power of two, at least 16.
        num_warps, num_stages: Triton's.
    """

    columns: int
    num_warps: int
    num_stages: int

    def check(self, value_dim: int) -> None:
        """Refuse columns that do not divide a head of ``value_dim``.

        Raises:
            InputError: they do not, or are fewer than a product takes.
        """
        if self.columns < 16 or value_dim % self.columns:
            raise InputError(f"columns must divide Dv = {value_dim} and be at least 16, got {self.columns}")


def default_chunk_config(key_dim: int, value_dim: int) -> ChunkConfig:
    """Programs of 32 columns, as many as no operand spills with; four for a head of the public model."""
    return ChunkConfig(min(value_dim, 32 if key_dim > 16 else 16), 4, 1)


@triton.jit
def _silu(b_x):
    return b_x * tl.sigmoid(b_x)


@triton.jit
def _product(b_x, b_y):
    return tl.dot(b_x, b_y, input_precision=_PRECISION)


@triton.jit
def _half(b_blocks, WHICH: tl.constexpr):
    """One block of two, ``[2, B, B] -> [B, B]``."""
    return tl.sum(tl.where((tl.arange(0, 2) == WHICH)[:, None, None], b_blocks, 0.0), axis=0)


@triton.jit
def unit_lower_inverse(b_lower, HALF: tl.constexpr):
    """Inverse ``[BT, BT]`` of I + a strictly lower triangular matrix, with ``BT = 2 HALF``.

    The diagonal halves by substitution, row by row, both at once; then
    ``[[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]``. A product of powers of the matrix would need
    fewer steps, but its terms grow like binomials where keys are alike, and cancel.
    """
    o_in, o_half = tl.arange(0, HALF), tl.arange(0, 2)
    m_own = o_half[:, None, None, None] == o_half[None, None, :, None]
    b_blocks = tl.reshape(b_lower, [2, HALF, 2, HALF])
    b_below = _half(tl.sum(tl.where(m_own, 0.0, b_blocks), axis=2), 1)  # [HALF, HALF]
    b_inverse = -tl.sum(tl.where(m_own, b_blocks, 0.0), axis=2)  # [2, HALF, HALF]
    for i in range(1, HALF):
        m_row = (o_in == i)[None, :, None]
        b_row = tl.sum(tl.where(m_row, b_inverse, 0.0), axis=1)  # [2, HALF]
        b_row += tl.sum(b_row[:, :, None] * b_inverse, axis=1)
        b_inverse = tl.where(m_row, b_row[:, None, :], b_inverse)
    b_inverse += tl.where(o_in[:, None] == o_in[None, :], 1.0, 0.0)[None, :, :]
    b_below = _product(_product(_half(b_inverse, 1), b_below), _half(b_inverse, 0))
    m_below = o_half[:, None, None, None] > o_half[None, None, :, None]
    b_whole = tl.where(m_below, -b_below[None, :, None, :], tl.where(m_own, b_inverse[:, :, None, :], 0.0))
    return tl.reshape(b_whole, [2 * HALF, 2 * HALF])


@triton.jit(do_not_specialize=["longest"])
def delta_keys_kernel(
    p_y, stride_y, p_requests, p_first_row, p_rows, longest, p_overlap, p_scores,
    HK: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
    Q_SCALE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program multiplies the keys of a chunk and a head with one another and with the queries.

    It replaces the convolution's queries and keys by normalised ones.
    """
    start_dependent(DEPENDENT)
    i_chunk, i_key, i_place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(p_requests + i_place) < 0:
        return
    first, rows = request_rows(p_first_row, p_rows, i_place, longest)
    if i_chunk * BT >= rows:
        return
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    m_row = (i_chunk * BT + o_t < rows)[:, None]
    o_row = (first + i_chunk * BT + o_t)[:, None]  # [BT, 1] int64
    p_q = p_y + o_row * stride_y + i_key * DK + o_k[None, :]
    p_k = p_q + HK * DK
    b_q_squares, b_k_squares = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    for start in range(0, DK, BK):
        b_q = _silu(tl.load(p_q + start, mask=m_row, other=0.0))  # [BT, BK]
        b_k = _silu(tl.load(p_k + start, mask=m_row, other=0.0))
        b_q_squares += tl.sum(b_q * b_q, axis=1)
        b_k_squares += tl.sum(b_k * b_k, axis=1)
    b_q_scale = (Q_SCALE * tl.rsqrt(b_q_squares + _L2_EPS))[:, None]
    b_k_scale = tl.rsqrt(b_k_squares + _L2_EPS)[:, None]
    b_overlap, b_scores = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for start in range(0, DK, BK):
        b_q = _silu(tl.load(p_q + start, mask=m_row, other=0.0)) * b_q_scale
        b_k = _silu(tl.load(p_k + start, mask=m_row, other=0.0)) * b_k_scale
        b_overlap += _product(b_k, tl.trans(b_k))
        b_scores += _product(b_q, tl.trans(b_k))
        tl.debug_barrier()  # all threads have loaded what is replaced
        tl.store(p_q + start, b_q, mask=m_row)
        tl.store(p_k + start, b_k, mask=m_row)
    o_square = (o_row * HK + i_key) * BT + o_t[None, :]
    tl.store(p_overlap + o_square, b_overlap, mask=m_row)
    tl.store(p_scores + o_square, b_scores, mask=m_row)


@triton.jit(do_not_specialize=["longest"])
def delta_solve_kernel(
    p_overlap, p_scores, p_a, stride_a, p_b, stride_b, p_a_log, p_dt_bias,
    p_requests, p_first_row, p_rows, longest, p_solve, p_attend, p_decay,
    HK: tl.constexpr, HV: tl.constexpr, BT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program computes the gates of a chunk and a value head, and all that needs no state."""
    start_dependent(DEPENDENT)
    i_chunk, i_head, i_place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(p_requests + i_place) < 0:
        return
    first, rows = request_rows(p_first_row, p_rows, i_place, longest)
    if i_chunk * BT >= rows:
        return
    o_t = tl.arange(0, BT)
    m_row = i_chunk * BT + o_t < rows
    o_row = first + i_chunk * BT + o_t  # [BT] int64
    b_a = tl.load(p_a + o_row * stride_a + i_head, mask=m_row, other=0.0)
    b_b = tl.load(p_b + o_row * stride_b + i_head, mask=m_row, other=0.0)
    b_g, b_beta = decay_and_beta(b_a, b_b, decay_rate(p_a_log, i_head), tl.load(p_dt_bias + i_head))
    # Rows beyond the text decay nothing and write nothing.
    b_g, b_beta = tl.where(m_row, b_g, 0.0), tl.where(m_row, b_beta, 0.0)
    # A sum in two numbers: differences of rows keep their precision behind a row that decays all.
    b_wide = tl.cumsum(b_g.to(tl.float64), axis=0)
    b_sum = b_wide.to(tl.float32)
    b_rest = (b_wide - b_sum.to(tl.float64)).to(tl.float32)
    b_after = (tl.sum(b_g.to(tl.float64), axis=0) - b_wide).to(tl.float32)
    p_factors = p_decay + (o_row * HV + i_head) * 2
    tl.store(p_factors, tl.exp(b_sum), mask=m_row)
    tl.store(p_factors + 1, tl.exp(b_after), mask=m_row)

    b_pair = (b_sum[:, None] - b_sum[None, :]) + (b_rest[:, None] - b_rest[None, :])
    b_pair = tl.exp(tl.where(o_t[:, None] >= o_t[None, :], b_pair, float("-inf")))  # [BT, BT]
    o_pair = (o_row * HK + i_head // (HV // HK))[:, None] * BT + o_t[None, :]
    o_square = (o_row * HV + i_head)[:, None] * BT + o_t[None, :]
    b_scores = tl.load(p_scores + o_pair, mask=m_row[:, None], other=0.0)
    tl.store(p_attend + o_square, b_scores * b_pair, mask=m_row[:, None])
    b_overlap = tl.load(p_overlap + o_pair, mask=m_row[:, None], other=0.0)
    b_lower = tl.where(o_t[:, None] > o_t[None, :], b_beta[:, None] * b_pair * b_overlap, 0.0)
    b_solve = unit_lower_inverse(b_lower, BT // 2) * b_beta[None, :]
    tl.store(p_solve + o_square, b_solve, mask=m_row[:, None])


@triton.jit(do_not_specialize=["longest"])
def delta_state_kernel(
    p_y, stride_y, p_solve, p_attend, p_decay, p_state, stride_state,
    p_requests, p_read_slots, p_first_row, p_rows, longest, p_out, stride_out,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program takes a request's chunks one after another for BV columns of a value head.

    The state stays in slot 0, and so in caches, and is taken BK rows at a time: as one operand of a product
    of TF32 parts it would not fit into the registers beside the others.
    """
    start_dependent(DEPENDENT)
    i_place = tl.program_id(1)
    request = tl.load(p_requests + i_place).to(tl.int64)
    if request < 0:
        return
    first, rows = request_rows(p_first_row, p_rows, i_place, longest)
    if rows == 0:
        return
    TILES: tl.constexpr = DV // BV
    GROUP: tl.constexpr = HV // HK
    i_head, i_tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_tile * BV + tl.arange(0, BV)
    p_s = p_state + request * stride_state + i_head * (DK * DV) + o_k[:, None] * DV + o_v[None, :]
    p_first = p_s + tl.load(p_read_slots + i_place) * (HV * DK * DV)
    for i in range(0, DK, BK):
        tl.store(p_s + i * DV, tl.load(p_first + i * DV))
    p_q = p_y + (i_head // GROUP) * DK + o_k[None, :]
    p_k = p_q + HK * DK
    p_v = p_y + 2 * HK * DK + i_head * DV + o_v[None, :]
    p_o = p_out + i_head * DV + o_v[None, :]
    for start in range(0, rows, BT):
        tl.debug_barrier()  # the state is written
        m_row = (start + o_t < rows)[:, None]
        o_row = (first + start + o_t)[:, None]  # [BT, 1]
        # Under way while the state is multiplied; squares would take too many registers meanwhile.
        p_factors = p_decay + (o_row * HV + i_head) * 2
        b_before = tl.load(p_factors, mask=m_row, other=0.0)
        b_after = tl.load(p_factors + 1, mask=m_row, other=0.0)
        last = first + tl.minimum(start + BT, rows) - 1
        decay = tl.load(p_decay + (last * HV + i_head) * 2)
        b_v = tl.load(p_v + o_row * stride_y, mask=m_row, other=0.0)  # [BT, BV]
        b_read = tl.zeros([BT, BV], tl.float32)
        b_o = tl.zeros([BT, BV], tl.float32)
        for i in range(0, DK, BK):
            b_s = tl.load(p_s + i * DV)  # [BK, BV]
            b_k = tl.load(p_k + i + o_row * stride_y, mask=m_row, other=0.0)  # [BT, BK]
            b_read += _product(b_k, b_s)
            b_q = tl.load(p_q + i + o_row * stride_y, mask=m_row, other=0.0)
            b_o += _product(b_q, b_s)

        o_square = (o_row * HV + i_head) * BT + o_t[None, :]
        b_solve = tl.load(p_solve + o_square, mask=m_row, other=0.0)  # [BT, BT]
        b_update = _product(b_solve, _silu(b_v) - b_before * b_read)  # [BT, BV]
        b_attend = tl.load(p_attend + o_square, mask=m_row, other=0.0)
        b_o = b_before * b_o + _product(b_attend, b_update)
        tl.store(p_o + o_row * stride_out, b_o, mask=m_row)

        b_update = b_after * b_update
        for i in range(0, DK, BK):
            b_k = tl.load(p_k + i + o_row * stride_y, mask=m_row, other=0.0)
            b_s = decay * tl.load(p_s + i * DV) + _product(tl.trans(b_k), b_update)
            tl.store(p_s + i * DV, b_s)


@triton.jit(do_not_specialize=["longest"])
def delta_norm_kernel(
    p_o, stride_o, p_z, stride_z, p_norm, eps, p_requests, p_first_row, p_rows, longest, p_out, stride_out,
    DV: tl.constexpr, BT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program normalises and gates BT rows of a value head."""
    start_dependent(DEPENDENT)
    i_head, i_place = tl.program_id(1), tl.program_id(2)
    if tl.load(p_requests + i_place) < 0:
        return
    first, rows = request_rows(p_first_row, p_rows, i_place, longest)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_row = (o_t < rows)[:, None]
    o_row, o_v = (first + o_t)[:, None], tl.arange(0, DV)
    o_column = i_head * DV + o_v[None, :]
    b_o = tl.load(p_o + o_row * stride_o + o_column, mask=m_row, other=0.0)  # [BT, DV]
    b_z = tl.load(p_z + o_row * stride_z + o_column, mask=m_row, other=0.0).to(tl.float32)
    b_inverse = tl.rsqrt(tl.sum(b_o * b_o, axis=1) * (1.0 / DV) + eps)
    b_o = b_o * b_inverse[:, None] * tl.load(p_norm + o_v).to(tl.float32)[None, :] * tl.sigmoid(b_z)
    tl.store(p_out + o_row * stride_out + o_column, b_o.to(p_out.dtype.element_ty), mask=m_row)


def chunk_gated_delta_triton(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    ring: Tensor,
    state: Tensor,
    rows: RequestRows,
    eps: float = 1e-6,
    out: Tensor | None = None,
    config: ChunkConfig | None = None,
) -> Tensor:
    """What :func:`~page4.kernels.gated_delta_triton.gated_delta_triton` computes of a prompt's rows.

    Arguments, results and errors are those of that function with ``every_row=False``, whatever the number of
    rows; here ``z`` may be given for heads of any size. Products run on tensor cores of compute capability
    8.0 or newer, as three products of TF32 parts each.

    Besides ``out``, FP32 workspace of ``C + 2 CHUNK (Hk + Hv) + 2 Hv`` numbers a row is allocated: 74 KB for
    the public model. Nothing synchronises with the host.

    Raises:
        InputError: shapes, dtypes, strides or devices that disagree, or sizes without kernels.
    """
    key_heads = checked_key_heads(inputs, weights, ring, state, rows, every_row=False)
    heads, key_dim, value_dim = state.shape[2:]
    config = config or default_chunk_config(key_dim, value_dim)
    config.check(value_dim)
    out = checked_out(inputs, heads, value_dim, out)
    batch, num_rows = rows.requests.shape[0], inputs.mixed.shape[0]
    if batch == 0:
        return out
    device = inputs.mixed.device
    y = causal_conv_triton(inputs.mixed, weights.conv, ring, rows)  # [N, C]
    overlap, scores = torch.empty(2, num_rows, key_heads, CHUNK, device=device)
    solve, attend = torch.empty(2, num_rows, heads, CHUNK, device=device)
    decay = torch.empty(num_rows, heads, 2, device=device)
    # Values are not read again once a program has replaced them by its outputs.
    o = out if inputs.z is None else y[:, 2 * key_heads * key_dim :]
    dependent, part = launches_dependents(device), min(key_dim, _STATE_PART)
    lists = (rows.requests, rows.first_row, rows.rows, rows.longest)
    chunks = triton.cdiv(rows.longest, CHUNK)
    delta_keys_kernel[(chunks, key_heads, batch)](
        y, y.stride(0), *lists, overlap, scores,
        HK=key_heads, DK=key_dim, BK=_KEYS_PART, BT=CHUNK, Q_SCALE=key_dim**-0.5, DEPENDENT=dependent,
        num_warps=_KEYS_WARPS, launch_pdl=dependent,
    )  # fmt: skip
    delta_solve_kernel[(chunks, heads, batch)](
        overlap, scores, inputs.a, inputs.a.stride(0), inputs.b, inputs.b.stride(0), weights.a_log,
        weights.dt_bias, *lists, solve, attend, decay,
        HK=key_heads, HV=heads, BT=CHUNK, DEPENDENT=dependent,
        num_warps=_SOLVE_WARPS, launch_pdl=dependent,
    )  # fmt: skip
    delta_state_kernel[(heads * (value_dim // config.columns), batch)](
        y, y.stride(0), solve, attend, decay, state, state.stride(0),
        rows.requests, rows.read_slots, rows.first_row, rows.rows, rows.longest, o, o.stride(0),
        HK=key_heads, HV=heads, DK=key_dim, DV=value_dim, BT=CHUNK,
        BK=part, BV=config.columns, DEPENDENT=dependent,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=dependent,
    )  # fmt: skip
    if inputs.z is not None:
        delta_norm_kernel[(triton.cdiv(rows.longest, _NORM_ROWS), heads, batch)](
            o, o.stride(0), inputs.z, inputs.z.stride(0), weights.norm, eps, *lists, out, out.stride(0),
            DV=value_dim, BT=_NORM_ROWS, DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
        )  # fmt: skip
    return out
