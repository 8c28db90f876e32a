"""What stands between the matrix products of a mixture of experts in a decode step, a launch each.

Route, activate, combine: nothing depends on how many rows chose an expert, so nothing waits for the host.
Everything is FP32 inside and rounded once. Source of the formulas: Qwen4Exp reference implementation.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError

_BLOCK = 512


@triton.jit
def route_kernel(
    p_logits, stride_logits, p_weights, p_chosen, experts,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr, RENORMALISE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program chooses one row's experts: the most probable one, k times; ties to the lower index."""
    start_dependent(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_expert = tl.arange(0, E_PAD)  # [E]
    m_expert = o_expert < experts
    b_logit = tl.load(p_logits + i_row * stride_logits + o_expert, mask=m_expert, other=-float("inf"))
    b_logit = b_logit.to(tl.float32)
    b_power = tl.exp(b_logit - tl.max(b_logit, axis=0))
    total = tl.sum(b_power, axis=0)
    b_left = tl.where(m_expert, b_power, -1.0)
    o_choice = tl.arange(0, K_PAD)  # [K]
    b_weight = tl.zeros([K_PAD], tl.float32)
    b_chosen = tl.zeros([K_PAD], tl.int32)
    for choice in tl.static_range(TOP_K):
        best = tl.max(b_left, axis=0)
        # NaN equals nothing: whatever a row holds, its experts exist.
        expert = tl.minimum(tl.min(tl.where(b_left == best, o_expert, E_PAD), axis=0), experts - 1)
        b_weight = tl.where(o_choice == choice, best, b_weight)
        b_chosen = tl.where(o_choice == choice, expert, b_chosen)
        b_left = tl.where(o_expert == expert, -1.0, b_left)
    if RENORMALISE:
        total = tl.sum(b_weight, axis=0)
    o_out, m_choice = i_row * TOP_K + o_choice, o_choice < TOP_K
    tl.store(p_weights + o_out, b_weight / total, mask=m_choice)
    tl.store(p_chosen + o_out, b_chosen.to(tl.int64), mask=m_choice)


@triton.jit
def swiglu_kernel(
    p_gate, stride_gate, p_up, stride_up, p_out, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """One program: BLOCK features of one row, ``silu(gate) * up``."""
    start_dependent(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_feature = o_feature < width
    b_gate = tl.load(p_gate + i_row * stride_gate + o_feature, mask=m_feature, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + i_row * stride_up + o_feature, mask=m_feature, other=0.0).to(tl.float32)
    b_y = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_out + i_row * width + o_feature, b_y.to(p_out.dtype.element_ty), mask=m_feature)


@triton.jit
def combine_kernel(
    p_outputs, p_weights, p_chosen, p_shared, p_gate, p_out, rows, width,
    TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK features of one row, its experts' weighted outputs and the gated shared one."""
    start_dependent(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_feature = o_feature < width
    b_y = tl.load(p_shared + i_row * width + o_feature, mask=m_feature, other=0.0).to(tl.float32)
    b_y *= tl.sigmoid(tl.load(p_gate + i_row).to(tl.float32))
    for choice in tl.static_range(TOP_K):
        o_choice = i_row * TOP_K + choice
        o_output = o_choice
        if BY_EXPERT:
            o_output = tl.load(p_chosen + o_choice) * rows + i_row
        b_own = tl.load(p_outputs + o_output * width + o_feature, mask=m_feature, other=0.0)
        b_y += tl.load(p_weights + o_choice) * b_own.to(tl.float32)
    tl.store(p_out + i_row * width + o_feature, b_y.to(p_out.dtype.element_ty), mask=m_feature)


def route_triton(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The top k of each row's softmax: FP32 weights and int64 experts, ``[N, k]`` each, of logits ``[N, E]``.

    ``renormalise`` makes the weights of a row sum up to 1.

    Raises:
        InputError: logits with other strides, or a k outside 1..E.
    """
    if logits.ndim != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise InputError(f"router logits must be [N, E] with adjacent experts, got {list(logits.shape)}")
    rows, experts = logits.shape
    if not 1 <= top_k <= experts:
        raise InputError(f"top_k must lie in 1..{experts}, got {top_k}")
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    dependent = launches_dependents(logits.device)
    if rows:
        route_kernel[(rows,)](
            logits, logits.stride(0), weights, chosen, experts,
            TOP_K=top_k, K_PAD=triton.next_power_of_2(top_k), E_PAD=triton.next_power_of_2(experts),
            RENORMALISE=renormalise, DEPENDENT=dependent, num_warps=1 if experts <= 128 else 4,
            launch_pdl=dependent,
        )  # fmt: skip
    return weights, chosen


def swiglu_triton(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[R, I]`` each, with adjacent features; contiguous ``[R, I]`` in their dtype.

    Raises:
        InputError: shapes, dtypes or strides that disagree.
    """
    if gate.shape != up.shape or gate.ndim != 2 or gate.dtype != up.dtype:
        raise InputError(
            f"gate {gate.dtype} {list(gate.shape)} and up {up.dtype} {list(up.shape)} must agree"
        )
    rows, width = gate.shape
    if width > 1 and (gate.stride(1) != 1 or up.stride(1) != 1):
        raise InputError("features of gate and up must be adjacent")
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    dependent, block = launches_dependents(gate.device), min(_BLOCK, triton.next_power_of_2(width))
    if rows and width:
        swiglu_kernel[(rows, triton.cdiv(width, block))](
            gate, gate.stride(0), up, up.stride(0), out, width, BLOCK=block, DEPENDENT=dependent,
            num_warps=max(1, block // 256), launch_pdl=dependent,
        )  # fmt: skip
    return out


def combine_triton(
    outputs: Tensor, weights: Tensor, chosen: Tensor, shared: Tensor, gate: Tensor, by_expert: bool
) -> Tensor:
    """``sum_j weights[n, j] * output of choice j + sigmoid(gate[n]) * shared[n]``, ``[N, H]``.

    An expert that a row did not choose is not read for it.

    Shapes: ``weights`` FP32 and ``chosen`` int64 ``[N, k]``, ``shared`` ``[N, H]``, ``gate`` ``[N, 1]``;
    ``outputs`` is ``[E, N, H]`` if ``by_expert``, else ``[N * k, H]``, a row for each choice. All contiguous.

    Raises:
        InputError: shapes or strides that disagree.
    """
    (rows, top_k), width = weights.shape, shared.shape[-1]
    expected = (outputs.shape[0], rows, width) if by_expert else (rows * top_k, width)
    if outputs.shape != expected or chosen.shape != weights.shape or shared.shape != (rows, width):
        raise InputError(
            f"outputs {list(outputs.shape)}, choices {list(chosen.shape)} and shared {list(shared.shape)} "
            f"must be {list(expected)}, {[rows, top_k]} and {[rows, width]}"
        )
    if gate.shape != (rows, 1) or not all(
        x.is_contiguous() for x in (outputs, weights, chosen, shared, gate)
    ):
        raise InputError(f"all must be contiguous, and the gate [{rows}, 1], got {list(gate.shape)}")
    out, dependent = torch.empty_like(shared), launches_dependents(shared.device)
    if rows:
        combine_kernel[(rows, triton.cdiv(width, _BLOCK))](
            outputs, weights, chosen, shared, gate, out, rows, width, TOP_K=top_k, BY_EXPERT=by_expert,
            BLOCK=min(_BLOCK, triton.next_power_of_2(width)), DEPENDENT=dependent, num_warps=2,
            launch_pdl=dependent,
        )  # fmt: skip
    return out
