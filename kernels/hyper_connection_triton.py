"""What stands between the matrix products of a hyper-connection, a launch each.

A read of the residual streams is norm, product, activation, product, mix; as single tensor operations it is
about twenty launches, and a decode step of few rows consists of launches. Everything is FP32 inside and
rounded once. The formulas are those of ``HyperConnection`` in the model.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError

_MIX_BLOCK, _WRITE_BLOCK, _LOW_BLOCK = 256, 512, 512


@triton.jit
def group_norm_kernel(
    p_x, stride_x, p_weight, p_out, width, eps, GROUPS: tl.constexpr, BW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program normalises one group of features of one row."""
    start_dependent(DEPENDENT)
    i_row, i_group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_feature = tl.arange(0, BW)  # [BW]
    m_feature = o_feature < width
    o_own = i_group * width + o_feature
    b_x = tl.load(p_x + i_row * stride_x + o_own, mask=m_feature, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_own, mask=m_feature, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / width + eps)
    b_y = b_x * inverse * (1.0 + b_weight)
    tl.store(p_out + i_row * (GROUPS * width) + o_own, b_y.to(p_out.dtype.element_ty), mask=m_feature)


@triton.jit
def activate_kernel(
    p_low, p_inject, low_values, inject_values, streams, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """In place: ``silu(low / S)`` and ``2 sigmoid(inject / S)``, over all rows at once."""
    start_dependent(DEPENDENT)
    o_value = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_value = o_value < low_values
    b_low = tl.load(p_low + o_value, mask=m_value, other=0.0).to(tl.float32) / streams
    b_low = b_low * tl.sigmoid(b_low)
    tl.store(p_low + o_value, b_low.to(p_low.dtype.element_ty), mask=m_value)
    if p_inject is not None:
        m_inject = o_value < inject_values
        b_inject = tl.load(p_inject + o_value, mask=m_inject, other=0.0).to(tl.float32) / streams
        b_inject = 2.0 * tl.sigmoid(b_inject)
        tl.store(p_inject + o_value, b_inject.to(p_inject.dtype.element_ty), mask=m_inject)


@triton.jit
def mix_streams_kernel(
    p_gate, p_normed, p_out, width, STREAMS: tl.constexpr, BW: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """One program: BW features of one row, ``mean over the streams of sigmoid(gate) * normed``."""
    start_dependent(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_feature = tl.program_id(1) * BW + tl.arange(0, BW)  # [BW]
    m_feature = o_feature < width
    b_sum = tl.zeros([BW], tl.float32)
    for stream in tl.static_range(STREAMS):
        o_own = (i_row * STREAMS + stream) * width + o_feature
        b_gate = tl.load(p_gate + o_own, mask=m_feature, other=0.0).to(tl.float32)
        b_normed = tl.load(p_normed + o_own, mask=m_feature, other=0.0).to(tl.float32)
        b_sum += tl.sigmoid(b_gate) * b_normed
    b_mixed = b_sum / STREAMS
    tl.store(p_out + i_row * width + o_feature, b_mixed.to(p_out.dtype.element_ty), mask=m_feature)


@triton.jit
def write_streams_kernel(
    p_residual, stride_residual, p_output, stride_output, p_inject, p_out, width,
    STREAMS: tl.constexpr, BW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BW features of one row, ``residual[c] + inject[c] * output`` for every stream c."""
    start_dependent(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_feature = tl.program_id(1) * BW + tl.arange(0, BW)  # [BW]
    m_feature = o_feature < width
    b_output = tl.load(p_output + i_row * stride_output + o_feature, mask=m_feature, other=0.0).to(tl.float32)
    for stream in tl.static_range(STREAMS):
        inject = tl.load(p_inject + i_row * STREAMS + stream).to(tl.float32)
        o_own = stream * width + o_feature
        b_x = tl.load(p_residual + i_row * stride_residual + o_own, mask=m_feature, other=0.0).to(tl.float32)
        b_x += inject * b_output
        tl.store(p_out + i_row * (STREAMS * width) + o_own, b_x.to(p_out.dtype.element_ty), mask=m_feature)


def group_norm_triton(x: Tensor, weight: Tensor, groups: int, eps: float = 1e-6) -> Tensor:
    """:func:`~page4.kernels.norm_rope.rms_norm_zero_centred` over each of ``groups`` runs of features.

    Shapes: ``x`` is ``[N, C]`` with adjacent features, ``weight`` ``[C]``; returns ``[N, C]`` in x's dtype.

    Raises:
        InputError: shapes or strides that disagree, or C that is no multiple of ``groups``.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:] or (x.shape[1] > 1 and x.stride(1) != 1):
        raise InputError(f"the norm of {list(x.shape)} needs adjacent features, and weights [{x.shape[-1]}]")
    rows, channels = x.shape
    if groups < 1 or channels % groups or channels == 0 or not weight.is_contiguous():
        raise InputError(f"{groups} groups do not divide the {channels} features")
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    block, dependent = triton.next_power_of_2(channels // groups), launches_dependents(x.device)
    if rows:
        group_norm_kernel[(rows, groups)](
            x, x.stride(0), weight, out, channels // groups, eps, GROUPS=groups, BW=block,
            DEPENDENT=dependent, num_warps=min(16, max(1, block // 512)), launch_pdl=dependent,
        )  # fmt: skip
    return out


def activate_triton(low: Tensor, inject: Tensor | None, streams: int) -> None:
    """In place: ``low`` becomes ``silu(low / S)`` and ``inject``, if any, ``2 sigmoid(inject / S)``.

    Raises:
        InputError: a tensor that is not contiguous, or more injection weights than values of ``low``.
    """
    if not low.is_contiguous() or (inject is not None and not inject.is_contiguous()):
        raise InputError("the low-rank values and the injection weights must be contiguous")
    injected = 0 if inject is None else inject.numel()
    dependent = launches_dependents(low.device)
    if low.numel():
        activate_kernel[(triton.cdiv(max(low.numel(), injected), _LOW_BLOCK),)](
            low, inject, low.numel(), injected, float(streams), BLOCK=_LOW_BLOCK, DEPENDENT=dependent,
            num_warps=4, launch_pdl=dependent,
        )  # fmt: skip


def mix_streams_triton(gate: Tensor, normed: Tensor, streams: int) -> Tensor:
    """``mean over streams of sigmoid(gate) * normed``: two ``[N, S*H]`` in one dtype to ``[N, H]``.

    Raises:
        InputError: shapes, dtypes or strides that disagree.
    """
    if gate.shape != normed.shape or gate.ndim != 2 or gate.dtype != normed.dtype:
        raise InputError(
            f"gate {gate.dtype} {list(gate.shape)} and streams {normed.dtype} {list(normed.shape)} must agree"
        )
    if gate.shape[1] % streams or not gate.is_contiguous() or not normed.is_contiguous():
        raise InputError(f"gate and streams must be contiguous [N, {streams} H], got {list(gate.shape)}")
    rows, width = gate.shape[0], gate.shape[1] // streams
    out, dependent = gate.new_empty(rows, width), launches_dependents(gate.device)
    if rows:
        mix_streams_kernel[(rows, triton.cdiv(width, _MIX_BLOCK))](
            gate, normed, out, width, STREAMS=streams, BW=_MIX_BLOCK, DEPENDENT=dependent, num_warps=2,
            launch_pdl=dependent,
        )  # fmt: skip
    return out


def write_streams_triton(residual: Tensor, output: Tensor, inject: Tensor) -> Tensor:
    """``residual[c] + inject[c] * output`` for every stream c, ``[N, S*H]`` in the residual's dtype.

    Shapes: ``residual`` ``[N, S*H]``, ``output`` ``[N, H]``, ``inject`` ``[N, S]``.

    Raises:
        InputError: shapes or strides that disagree.
    """
    rows, streams = inject.shape
    width = output.shape[1]
    if residual.shape != (rows, streams * width) or output.shape[0] != rows or not inject.is_contiguous():
        raise InputError(
            f"residual {list(residual.shape)}, output {list(output.shape)} and contiguous inject "
            f"{list(inject.shape)} must be [N, S H], [N, H] and [N, S]"
        )
    if any(x.shape[1] > 1 and x.stride(1) != 1 for x in (residual, output)):
        raise InputError("features of the residual and of the output must be adjacent")
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    dependent = launches_dependents(residual.device)
    if rows:
        write_streams_kernel[(rows, triton.cdiv(width, _WRITE_BLOCK))](
            residual, residual.stride(0), output, output.stride(0), inject, out, width,
            STREAMS=streams, BW=_WRITE_BLOCK, DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
        )  # fmt: skip
    return out
