"""Causal depthwise convolution over packed rows, with the inputs that later steps need in a ring.

A request's input at position p lies in place ``p % capacity`` of its ring, ``[requests, capacity, C]``.
Rejected rows are overwritten by the rows that take their positions, so nothing is ever rolled back.

No two programs share a place that one reads and another writes. A step of T rows from position p reads
``p - L .. p - 1``, with ``L = (k - 1) * dilation``, and writes ``p .. p + T - 1``. With ``L + T <= capacity``
these are different places, and one launch does both; the last rows of a longer step are written by a launch
of their own, after all have read.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError
from page4.kernels.recurrent_rows import RequestRows

_ROWS, _CHANNELS, _WARPS = 8, 512, 4  # of a program


@triton.jit
def request_rows(p_first_row, p_rows, i_place, longest):
    """First packed row (int64) and number of rows of the request in a place of the batch."""
    if p_first_row is None:
        return i_place.to(tl.int64) * longest, longest
    else:
        return tl.load(p_first_row + i_place), tl.load(p_rows + i_place).to(tl.int32)


@triton.jit
def ring_place(position, CAPACITY: tl.constexpr):
    """Place of a position, which may be negative by less than a ring."""
    return (position + CAPACITY) % CAPACITY


@triton.jit(do_not_specialize=["longest"])
def causal_conv_kernel(
    p_x, stride_x, p_weight, p_ring, stride_ring, p_requests, p_positions, p_first_row, p_rows, longest,
    p_out, stride_out, channels,
    TAPS: tl.constexpr, DILATION: tl.constexpr, CAPACITY: tl.constexpr, STORE_INPUTS: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program convolves BT rows of a request in BC channels, and stores their inputs if it may."""
    start_dependent(DEPENDENT)
    i_place = tl.program_id(0)
    request = tl.load(p_requests + i_place).to(tl.int64)
    if request < 0:
        return
    first, rows = request_rows(p_first_row, p_rows, i_place, longest)
    o_row = tl.program_id(1) * BT + tl.arange(0, BT)  # [BT]
    o_channel = tl.program_id(2) * BC + tl.arange(0, BC)  # [BC]
    if tl.program_id(1) * BT >= rows:
        return
    m_channel = o_channel < channels
    m_row = o_row < rows
    position = tl.load(p_positions + first).to(tl.int32)
    p_request = p_ring + request * stride_ring
    b_y = tl.zeros([BT, BC], tl.float32)
    for tap in tl.static_range(TAPS):
        o_source = o_row - (TAPS - 1 - tap) * DILATION
        m_new = (m_row & (o_source >= 0))[:, None] & m_channel[None, :]
        p_new = p_x + (first + o_source)[:, None] * stride_x + o_channel[None, :]
        b_new = tl.load(p_new, mask=m_new, other=0.0)
        b_position = position + o_source
        # Before the text there are zeros, whatever the ring holds.
        m_old = (m_row & (o_source < 0) & (b_position >= 0))[:, None] & m_channel[None, :]
        o_ring = ring_place(b_position, CAPACITY) * channels
        b_old = tl.load(p_request + o_ring[:, None] + o_channel[None, :], mask=m_old, other=0.0)
        b_x = tl.where(m_new, b_new, b_old)
        b_weight = tl.load(p_weight + o_channel * TAPS + tap, mask=m_channel, other=0.0).to(tl.float32)
        b_y += b_x.to(tl.float32) * b_weight[None, :]
        if STORE_INPUTS and tap == TAPS - 1:
            tl.store(p_request + o_ring[:, None] + o_channel[None, :], b_x, mask=m_new)
    p_y = p_out + (first + o_row)[:, None] * stride_out + o_channel[None, :]
    tl.store(p_y, b_y.to(p_out.dtype.element_ty), mask=m_row[:, None] & m_channel[None, :])


@triton.jit(do_not_specialize=["longest"])
def store_inputs_kernel(
    p_x, stride_x, p_ring, stride_ring, p_requests, p_positions, p_first_row, p_rows, longest, channels,
    CAPACITY: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program stores the last rows of a request in BC channels, as many as the ring has places."""
    start_dependent(DEPENDENT)
    i_place = tl.program_id(0)
    request = tl.load(p_requests + i_place).to(tl.int64)
    if request < 0:
        return
    first, rows = request_rows(p_first_row, p_rows, i_place, longest)
    o_row = rows - 1 - tl.arange(0, BT)  # [BT] newest first
    o_channel = tl.program_id(1) * BC + tl.arange(0, BC)  # [BC]
    m_x = ((o_row >= 0) & (tl.arange(0, BT) < CAPACITY))[:, None] & (o_channel < channels)[None, :]
    b_x = tl.load(p_x + (first + o_row)[:, None] * stride_x + o_channel[None, :], mask=m_x, other=0.0)
    position = tl.load(p_positions + first, mask=rows > 0, other=0).to(tl.int32)
    o_ring = (position + o_row) % CAPACITY * channels
    tl.store(p_ring + request * stride_ring + o_ring[:, None] + o_channel[None, :], b_x, mask=m_x)


def check_ring(x: Tensor, weight: Tensor, ring: Tensor) -> None:
    """Refuse a ring that cannot serve inputs ``x [N, C]`` and taps ``weight [C, k]``.

    Raises:
        InputError: shapes, dtypes, strides or devices that disagree.
    """
    channels = x.shape[-1]
    if x.ndim != 2 or (channels > 1 and x.stride(1) != 1):
        raise InputError(f"inputs must be rows [N, C] of adjacent channels, got {list(x.shape)}")
    if weight.ndim != 2 or weight.shape[0] != channels or not weight.is_contiguous():
        raise InputError(f"convolution weight must be contiguous [{channels}, k], got {list(weight.shape)}")
    if ring.ndim != 3 or ring.shape[2] != channels or not ring[0].is_contiguous():
        raise InputError(
            f"ring must be [requests, capacity, {channels}], contiguous within a request, "
            f"got {list(ring.shape)}"
        )
    if ring.dtype != x.dtype:
        raise InputError(f"the ring is {ring.dtype}, its inputs are {x.dtype}")
    for name, tensor in (("weight", weight), ("ring", ring)):
        if tensor.device != x.device:
            raise InputError(f"{name} is on {tensor.device}, the inputs are on {x.device}")


def stores_in_place(ring: Tensor, length: int, rows: RequestRows) -> bool:
    """Whether a step may store its inputs while others of its programs still read; see the module.

    Raises:
        InputError: the ring is too short to serve any step.
    """
    capacity = ring.shape[1]
    if capacity <= length:
        raise InputError(f"the ring has {capacity} places, the convolution needs more than {length}")
    return length + rows.longest <= capacity


def causal_conv_triton(
    x: Tensor,
    weight: Tensor,
    ring: Tensor,
    rows: RequestRows,
    dilation: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`~page4.kernels.gated_delta.causal_conv1d_reference` of packed rows; updates the ring.

    Shapes: ``x`` is ``[N, C]`` with rows of any stride, ``weight`` is ``[C, k]``, ``ring`` is
    ``[requests, capacity, C]`` in the dtype of ``x`` and with more than ``L = (k - 1) * dilation`` places.
    Returns FP32 ``[N, C]``, written to ``out``, if given; rows of padding are left as they are. Speculation
    over T rows needs ``L + T`` places, so that rejected rows leave the accepted ones' inputs alone.

    One launch, or two if the longest request has more rows than the ring has places left; see the module.

    Raises:
        InputError: shapes, dtypes, strides or devices that disagree, or a ring that is too short.
    """
    check_ring(x, weight, ring)
    num_rows, channels = x.shape
    rows.check(num_rows, x.device)
    taps = weight.shape[1]
    in_place = stores_in_place(ring, (taps - 1) * dilation, rows)
    if out is None:
        out = torch.empty(num_rows, channels, dtype=torch.float32, device=x.device)
    if out.shape != x.shape or out.dtype != torch.float32 or (channels > 1 and out.stride(1) != 1):
        raise InputError(f"out must be float32 {list(x.shape)} of adjacent channels, got {list(out.shape)}")
    batch = rows.requests.shape[0]
    if batch == 0:
        return out
    dependent = launches_dependents(x.device)
    tile = min(_CHANNELS, triton.next_power_of_2(channels))
    grid = (batch, triton.cdiv(rows.longest, _ROWS), triton.cdiv(channels, tile))
    causal_conv_kernel[grid](
        x, x.stride(0), weight, ring, ring.stride(0), rows.requests, rows.positions, rows.first_row,
        rows.rows, rows.longest, out, out.stride(0), channels,
        TAPS=taps, DILATION=dilation, CAPACITY=ring.shape[1], STORE_INPUTS=in_place, BT=_ROWS, BC=tile,
        DEPENDENT=dependent, num_warps=_WARPS, launch_pdl=dependent,
    )  # fmt: skip
    if not in_place:
        store_inputs(x, ring, rows)
    return out


def store_inputs(x: Tensor, ring: Tensor, rows: RequestRows) -> None:
    """Put each request's last rows into its ring, as many as it has places; inputs are checked already."""
    batch, (_, capacity, channels) = rows.requests.shape[0], ring.shape
    dependent = launches_dependents(x.device)
    tile = min(_CHANNELS, triton.next_power_of_2(channels))
    store_inputs_kernel[(batch, triton.cdiv(channels, tile))](
        x, x.stride(0), ring, ring.stride(0), rows.requests, rows.positions, rows.first_row, rows.rows,
        rows.longest, channels,
        CAPACITY=capacity, BT=triton.next_power_of_2(capacity), BC=tile, DEPENDENT=dependent,
        num_warps=_WARPS, launch_pdl=dependent,
    )  # fmt: skip
