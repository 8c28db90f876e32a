"""A Gated DeltaNet layer between its projections, in one launch: convolution, gates, delta rule, gated norm.

One program takes a request's rows one after another for a value head, or for some of the columns of its
state, which stays in registers: it is read once, and written after every row of a decode step, or once at the
end of a prompt's chunk. Columns of the state do not meet, so programs share only the convolution's inputs,
which they keep as :mod:`~page4.kernels.causal_conv_triton` does: none reads what another writes. Which
program computes what depends on the sizes of heads alone, and rows are taken in order: a row's bits depend
neither on the batch nor on the rows that are verified with it.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.causal_conv_triton import (
    check_ring,
    request_rows,
    ring_place,
    store_inputs,
    stores_in_place,
)
from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError
from page4.kernels.gated_delta import L2_NORM_EPS
from page4.kernels.recurrent_rows import RequestRows

MAX_TAPS = 4
HEAD_DIMS = (16, 32, 64, 128, 256)
_L2_EPS = tl.constexpr(L2_NORM_EPS)
_MAX_ELEMENTS = 8 * 32 * 128  # of a state in registers: 128 a thread of 8 warps leave room for the rest


@dataclass(frozen=True)
class DeltaWeights:
    """Parameters of a layer: ``conv [C, k]``, ``a_log`` and ``dt_bias`` ``[Hv]``, ``norm [Dv]``."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True)
class DeltaInputs:
    """What a layer projects N rows to, in one dtype, rows of any stride.

    Attributes:
        mixed: ``[N, 2 Hk Dk + Hv Dv]``, queries, keys and values before the convolution.
        a, b: ``[N, Hv]``, what the gates are computed from.
        z: ``[N, Hv Dv]``, the output gate, or None for what comes before norm and gate.
    """

    mixed: Tensor
    a: Tensor
    b: Tensor
    z: Tensor | None


@dataclass(frozen=True)
class DeltaConfig:
    """How heads are cut into programs; never chosen by the batch, as other layouts' sums round otherwise.

    Attributes:
        columns: of a head's state ``[Dk, Dv]`` that one program keeps in registers, a power of two.
        num_warps: Triton's.
    """

    columns: int
    num_warps: int

    def check(self, value_dim: int, gated: bool) -> None:
        """Refuse a configuration that does not fit heads of ``value_dim`` columns.

        Raises:
            InputError: columns that do not divide a head, or not all of them where the output is gated.
        """
        if self.columns < 1 or value_dim % self.columns:
            raise InputError(f"columns must divide Dv = {value_dim}, got {self.columns}")
        if gated and self.columns != value_dim:
            raise InputError(
                f"programs of {self.columns} of {value_dim} columns cannot normalise a head: leave out z"
            )


def default_delta_config(key_dim: int, value_dim: int) -> DeltaConfig:
    """As many columns as fit into registers, 64 to 128 numbers of them a thread.

    Four warps with 128 numbers a thread cost fewer instructions a row than eight with 64, and two programs of
    them fit a multiprocessor, so that one computes while the other loads.
    """
    columns = min(value_dim, _MAX_ELEMENTS // key_dim)
    most = 8 if max(key_dim, columns) > 128 else 4
    return DeltaConfig(columns, max(1, min(most, key_dim * columns // (32 * 64))))


def norms_in_kernel(key_dim: int, value_dim: int) -> bool:
    """Whether a program has all columns of a head, so that it can normalise and gate them."""
    return default_delta_config(key_dim, value_dim).columns == value_dim


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))``, also where it is small: ``log(u) e / (u - 1)`` corrects ``u = 1 + e``."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, small)


@triton.jit
def decay_rate(p_a_log, i_head):
    """What a head's log decay is proportional to, FP32."""
    return -tl.exp(tl.load(p_a_log + i_head).to(tl.float32))


@triton.jit
def decay_and_beta(a, b, rate, dt_bias):
    """Log decay and strength of the write of one row or of several, FP32."""
    return rate * _softplus(a.to(tl.float32) + dt_bias.to(tl.float32)), tl.sigmoid(b.to(tl.float32))


@triton.jit
def _past(
    p_request, o_channel, channels, position, BACK: tl.constexpr, CAPACITY: tl.constexpr, TAPS: tl.constexpr
):
    """Inputs ``BACK`` rows before a position; zeros before the text, and where no tap reaches."""
    m_past = (position >= BACK) & (BACK < TAPS)
    o_ring = ring_place(position - BACK, CAPACITY) * channels
    return tl.load(p_request + o_ring + o_channel, mask=m_past & (o_channel >= 0), other=0.0)


@triton.jit
def _tap(p_weight, o_channel, BACK: tl.constexpr, TAPS: tl.constexpr):
    """FP32 weights of the tap that reads ``BACK`` rows back; 0 where there is none."""
    o_tap = o_channel * TAPS + (TAPS - 1 - BACK)
    return tl.load(p_weight + o_tap, mask=(o_channel >= 0) & (BACK < TAPS), other=0.0).to(tl.float32)


@triton.jit
def _activate(b_x0, b_x1, b_x2, b_x3, b_w0, b_w1, b_w2, b_w3):
    """SiLU of the convolution at one row, FP32."""
    b_y = b_x3.to(tl.float32) * b_w3 + b_x2.to(tl.float32) * b_w2
    b_y = b_y + b_x1.to(tl.float32) * b_w1 + b_x0.to(tl.float32) * b_w0
    return b_y * tl.sigmoid(b_y)


@triton.jit
def _l2_normalise(b_x):
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) + _L2_EPS)


@triton.jit
def _settled(b_x, AXIS: tl.constexpr):
    """The vector itself, as the sums of one number each.

    Triton carries the layout that a product with the state wants back to the loads that a vector comes from,
    and every thread would convolve all the elements that it multiplies. It does not carry it over a sum along
    the other axis.
    """
    return tl.sum(tl.expand_dims(b_x, AXIS), axis=AXIS)


@triton.jit(do_not_specialize=["longest"])
def gated_delta_kernel(
    p_mixed, stride_mixed, p_a, stride_a, p_b, stride_b, p_z, stride_z,
    p_conv, p_a_log, p_dt_bias, p_norm, eps, p_ring, stride_ring, p_state, stride_state,
    p_requests, p_read_slots, p_positions, p_first_row, p_rows, longest, p_out, stride_out,
    TAPS: tl.constexpr, CAPACITY: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, Q_SCALE: tl.constexpr,
    EVERY_ROW: tl.constexpr, STORE_INPUTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program computes all rows of a request for BV columns of a value head."""
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
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    SLOT: tl.constexpr = HV * DK * DV
    i_head, i_tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    position = tl.load(p_positions + first).to(tl.int32)

    o_k, o_v = tl.arange(0, DK), i_tile * BV + tl.arange(0, BV)
    o_tile = i_head * (DK * DV) + o_k[:, None] * DV + o_v[None, :]  # [DK, BV]
    p_states = p_state + request * stride_state
    b_state = tl.load(p_states + tl.load(p_read_slots + i_place) * SLOT + o_tile)

    # Windows of the convolution: x1 is the input of the row before, x0 that of the row itself.
    o_q = (i_head // GROUP) * DK + o_k
    o_key = HK * DK + o_q
    o_value = 2 * HK * DK + i_head * DV + o_v
    b_qw0, b_qw1 = _tap(p_conv, o_q, 0, TAPS), _tap(p_conv, o_q, 1, TAPS)
    b_qw2, b_qw3 = _tap(p_conv, o_q, 2, TAPS), _tap(p_conv, o_q, 3, TAPS)
    b_kw0, b_kw1 = _tap(p_conv, o_key, 0, TAPS), _tap(p_conv, o_key, 1, TAPS)
    b_kw2, b_kw3 = _tap(p_conv, o_key, 2, TAPS), _tap(p_conv, o_key, 3, TAPS)
    b_vw0, b_vw1 = _tap(p_conv, o_value, 0, TAPS), _tap(p_conv, o_value, 1, TAPS)
    b_vw2, b_vw3 = _tap(p_conv, o_value, 2, TAPS), _tap(p_conv, o_value, 3, TAPS)
    p_past = p_ring + request * stride_ring
    b_q1 = _past(p_past, o_q, CHANNELS, position, 1, CAPACITY, TAPS)
    b_q2 = _past(p_past, o_q, CHANNELS, position, 2, CAPACITY, TAPS)
    b_q3 = _past(p_past, o_q, CHANNELS, position, 3, CAPACITY, TAPS)
    b_k1 = _past(p_past, o_key, CHANNELS, position, 1, CAPACITY, TAPS)
    b_k2 = _past(p_past, o_key, CHANNELS, position, 2, CAPACITY, TAPS)
    b_k3 = _past(p_past, o_key, CHANNELS, position, 3, CAPACITY, TAPS)
    b_v1 = _past(p_past, o_value, CHANNELS, position, 1, CAPACITY, TAPS)
    b_v2 = _past(p_past, o_value, CHANNELS, position, 2, CAPACITY, TAPS)
    b_v3 = _past(p_past, o_value, CHANNELS, position, 3, CAPACITY, TAPS)

    p_row = p_mixed + first * stride_mixed
    b_q0, b_k0, b_v0 = tl.load(p_row + o_q), tl.load(p_row + o_key), tl.load(p_row + o_value)
    a = tl.load(p_a + first * stride_a + i_head)
    b = tl.load(p_b + first * stride_b + i_head)
    rate, dt_bias = decay_rate(p_a_log, i_head), tl.load(p_dt_bias + i_head)
    for t in range(rows):
        row = first + t
        # The next row is on its way while this one is computed.
        more = t + 1 < rows
        p_row = p_mixed + (row + 1) * stride_mixed
        b_next_q = tl.load(p_row + o_q, mask=more & (o_k >= 0), other=0.0)
        b_next_k = tl.load(p_row + o_key, mask=more & (o_k >= 0), other=0.0)
        b_next_v = tl.load(p_row + o_value, mask=more & (o_v >= 0), other=0.0)
        next_a = tl.load(p_a + (row + 1) * stride_a + i_head, mask=more, other=0.0)
        next_b = tl.load(p_b + (row + 1) * stride_b + i_head, mask=more, other=0.0)
        if p_z is not None:
            b_z = tl.load(p_z + row * stride_z + i_head * DV + o_v)

        b_k = _l2_normalise(_activate(b_k0, b_k1, b_k2, b_k3, b_kw0, b_kw1, b_kw2, b_kw3))
        b_k = _settled(b_k, 0)
        b_v = _settled(_activate(b_v0, b_v1, b_v2, b_v3, b_vw0, b_vw1, b_vw2, b_vw3), 1)
        g, beta = decay_and_beta(a, b, rate, dt_bias)

        b_state *= tl.exp(g)
        b_correction = beta * (b_v - tl.sum(b_state * b_k[:, None], axis=0))  # [BV]
        b_state += b_k[:, None] * b_correction[None, :]
        if EVERY_ROW:
            tl.store(p_states + t * SLOT + o_tile, b_state)
        b_q = _l2_normalise(_activate(b_q0, b_q1, b_q2, b_q3, b_qw0, b_qw1, b_qw2, b_qw3)) * Q_SCALE
        b_o = tl.sum(b_state * _settled(b_q, 0)[:, None], axis=0)  # [BV]
        if p_z is not None:
            inverse = tl.rsqrt(tl.sum(b_o * b_o, axis=0) * (1.0 / DV) + eps)
            b_o = b_o * inverse * tl.load(p_norm + o_v).to(tl.float32) * tl.sigmoid(b_z.to(tl.float32))
        tl.store(p_out + row * stride_out + i_head * DV + o_v, b_o.to(p_out.dtype.element_ty))

        if STORE_INPUTS:
            p_place = p_past + ring_place(position + t, CAPACITY) * CHANNELS
            tl.store(p_place + o_value, b_v0)
            if (i_tile == 0) & (i_head % GROUP == 0):
                tl.store(p_place + o_q, b_q0)
                tl.store(p_place + o_key, b_k0)
        b_q3, b_q2, b_q1, b_q0 = b_q2, b_q1, b_q0, b_next_q
        b_k3, b_k2, b_k1, b_k0 = b_k2, b_k1, b_k0, b_next_k
        b_v3, b_v2, b_v1, b_v0 = b_v2, b_v1, b_v0, b_next_v
        a, b = next_a, next_b
    if not EVERY_ROW:
        tl.store(p_states + o_tile, b_state)


def gated_delta_triton(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    ring: Tensor,
    state: Tensor,
    rows: RequestRows,
    every_row: bool,
    eps: float = 1e-6,
    out: Tensor | None = None,
    config: DeltaConfig | None = None,
) -> Tensor:
    """A layer's rows from projections to the output projection's input; advances its state.

    Formula, per value head, with q, k and v from the causal convolution and SiLU, and the rule of
    :func:`~page4.kernels.gated_delta.recurrent_gated_delta_reference`::

        g = -exp(a_log) softplus(a + dt_bias),  beta = sigmoid(b)
        out = o * rsqrt(mean(o^2) + eps) * norm * sigmoid(z)

    Shapes: ``ring`` is ``[requests, capacity, C]`` in the inputs' dtype, see
    :mod:`~page4.kernels.causal_conv_triton`; ``state`` is FP32 ``[requests, slots, Hv, Dk, Dv]``, read at
    ``rows.read_slots``. With ``every_row`` (a decode step, at most as many rows as slots) slot t gets the
    state after row t; else slot 0 gets that after the last row. Returns ``[N, Hv Dv]`` in the inputs' dtype,
    or FP32 ``o`` without ``z``, written to ``out``, if given; rows of padding are left as they are. Head
    dimensions are powers of two from 16 to 256; ``z`` needs :func:`norms_in_kernel`.

    One launch; one more, which stores the convolution's inputs, where a request has more rows than the ring
    has places left. Nothing synchronises with the host, and with ``out`` nothing is allocated.

    Raises:
        InputError: shapes, dtypes, strides or devices that disagree, sizes that the kernel is not made for,
            or more rows than slots.
    """
    key_heads = checked_key_heads(inputs, weights, ring, state, rows, every_row)
    heads, key_dim, value_dim = state.shape[2:]
    config = config or default_delta_config(key_dim, value_dim)
    config.check(value_dim, gated=inputs.z is not None)
    out = checked_out(inputs, heads, value_dim, out)
    taps = weights.conv.shape[1]
    in_place = stores_in_place(ring, taps - 1, rows)
    batch = rows.requests.shape[0]
    if batch == 0:
        return out
    dependent = launches_dependents(inputs.mixed.device)
    gated_delta_kernel[(heads * (value_dim // config.columns), batch)](
        inputs.mixed, inputs.mixed.stride(0), inputs.a, inputs.a.stride(0), inputs.b, inputs.b.stride(0),
        inputs.z, 0 if inputs.z is None else inputs.z.stride(0),
        weights.conv, weights.a_log, weights.dt_bias, weights.norm, eps,
        ring, ring.stride(0), state, state.stride(0),
        rows.requests, rows.read_slots, rows.positions, rows.first_row, rows.rows, rows.longest,
        out, out.stride(0),
        TAPS=taps, CAPACITY=ring.shape[1], HK=key_heads, HV=heads, DK=key_dim, DV=value_dim,
        BV=config.columns, Q_SCALE=key_dim**-0.5, EVERY_ROW=every_row, STORE_INPUTS=in_place,
        DEPENDENT=dependent, num_warps=config.num_warps, launch_pdl=dependent,
    )  # fmt: skip
    if not in_place:
        store_inputs(inputs.mixed, ring, rows)
    return out


def checked_out(inputs: DeltaInputs, heads: int, value_dim: int, out: Tensor | None) -> Tensor:
    """Where a call writes ``[N, Hv Dv]``: what was given, or new memory.

    Raises:
        InputError: a shape, dtype or strides that do not fit.
    """
    dtype = torch.float32 if inputs.z is None else inputs.z.dtype
    shape = (inputs.mixed.shape[0], heads * value_dim)
    if out is None:
        out = inputs.mixed.new_empty(shape, dtype=dtype)
    if out.shape != shape or out.dtype != dtype or out.stride(1) != 1:
        raise InputError(f"out must be {dtype} {list(shape)} of adjacent columns, got {list(out.shape)}")
    return out


def checked_key_heads(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    ring: Tensor,
    state: Tensor,
    rows: RequestRows,
    every_row: bool,
) -> int:
    """Number of key heads of a call whose tensors fit together.

    Raises:
        InputError: they do not, or have sizes without kernels.
    """
    check_ring(inputs.mixed, weights.conv, ring)
    num_rows, channels = inputs.mixed.shape
    rows.check(num_rows, inputs.mixed.device)
    if state.ndim != 5 or state.dtype != torch.float32 or not state[0].is_contiguous():
        raise InputError(
            "state must be float32 [requests, slots, Hv, Dk, Dv], contiguous within a request, "
            f"got {state.dtype} {list(state.shape)}"
        )
    slots, heads, key_dim, value_dim = state.shape[1:]
    for name, dim in (("Dk", key_dim), ("Dv", value_dim)):
        if dim not in HEAD_DIMS:
            raise InputError(f"{name} must be one of {', '.join(map(str, HEAD_DIMS))}, got {dim}")
    key_heads, left = divmod(channels - heads * value_dim, 2 * key_dim)
    if left or key_heads < 1 or heads % key_heads:
        raise InputError(
            f"{channels} channels are no 2 Hk {key_dim} + {heads} x {value_dim} with {heads} a multiple of Hk"
        )
    if weights.conv.shape[1] > MAX_TAPS:
        raise InputError(
            f"the convolution has {weights.conv.shape[1]} taps, at most {MAX_TAPS} are supported"
        )
    if ring.shape[0] != state.shape[0]:
        raise InputError(f"the ring is for {ring.shape[0]} requests, the state for {state.shape[0]}")
    if every_row and rows.longest > slots:
        raise InputError(f"{rows.longest} rows need as many slots, the state has {slots}")
    device, dtype = inputs.mixed.device, inputs.mixed.dtype
    columns = (("a", inputs.a, heads), ("b", inputs.b, heads), ("z", inputs.z, heads * value_dim))
    for name, x, width in columns:
        if x is not None and (x.shape != (num_rows, width) or x.dtype != dtype or x.stride(1) != 1):
            raise InputError(
                f"{name} must be {dtype} {[num_rows, width]} of adjacent columns, "
                f"got {x.dtype} {list(x.shape)}"
            )
    vectors = (("a_log", weights.a_log, heads), ("dt_bias", weights.dt_bias, heads))
    for name, x, size in (*vectors, ("norm", weights.norm, value_dim)):
        if x.shape != (size,) or not x.is_contiguous():
            raise InputError(f"{name} must be contiguous [{size}], got {list(x.shape)}")
    for name, x in (("state", state), ("a_log", weights.a_log), ("a", inputs.a)):
        if x.device != device:
            raise InputError(f"{name} is on {x.device}, the inputs are on {device}")
    return key_heads
