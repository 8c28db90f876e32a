"""The parts that splits of grouped attention leave behind, and the kernel that merges them."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_inputs import AttentionInputs

MAX_SPLITS = 64
_WARP_TILE = 1024  # numbers that a warp of the merge holds in registers


LN2 = tl.constexpr(math.log(2.0))


def check_splits(splits: int) -> None:
    """Refuse a number of splits that the merge cannot take.

    Raises:
        InputError: ``splits`` outside 1..64.
    """
    if not 1 <= splits <= MAX_SPLITS:
        raise InputError(f"splits must lie in 1..{MAX_SPLITS}, got {splits}")


@dataclass(frozen=True)
class Partials:
    """Softmax attention over each split's share of the tokens. FP32, for every format of K and V.

    Attributes:
        out: ``[G, splits, Hkv, M, D]``, normalised within the split; row ``m * heads + h`` of ``M`` is row
            ``m`` of the group and query head ``h`` of the KV head. Undefined where ``lse`` is -inf.
        lse: ``[G, splits, Hkv, M]``, base 2; -inf where the split holds no token that the row sees.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, inputs: AttentionInputs, splits: int) -> Partials:
        """Uninitialised parts for a call; the only place that says what they look like.

        Raises:
            InputError: a number of splits outside 1..64.
        """
        check_splits(splits)
        members = inputs.rows_per_group * inputs.heads_per_kv
        shape = (inputs.groups, splits, inputs.kv_heads, members)
        device = inputs.q.device
        return cls(
            torch.empty(*shape, inputs.head_dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    def check(self, inputs: AttentionInputs, splits: int) -> None:
        """Refuse parts that were made for another call.

        Raises:
            InputError: the first shape, dtype or layout that does not fit.
        """
        members = inputs.rows_per_group * inputs.heads_per_kv
        shape = (inputs.groups, splits, inputs.kv_heads, members)
        for name, values, expected in (
            ("out", self.out, (*shape, inputs.head_dim)),
            ("lse", self.lse, shape),
        ):
            if values.shape != expected or values.dtype != torch.float32 or not values.is_contiguous():
                raise InputError(
                    f"the partials' {name} must be contiguous float32 {list(expected)}, "
                    f"got {values.dtype} {list(values.shape)}"
                )


@triton.jit
def gated(b_out, p_gate, o_gate, m_gate):
    """``b_out`` (FP32); with a gate, times its sigmoid, and 0 where ``m_gate`` is false."""
    if p_gate is not None:
        b_gate = tl.load(p_gate + o_gate, mask=m_gate, other=0.0).to(tl.float32)
        b_out = tl.where(m_gate, b_out * tl.sigmoid(b_gate), 0.0)
    return b_out


@triton.jit
def merge_kernel(
    p_part, p_part_lse, p_group_start, p_group_rows, p_gate, stride_gate_row, stride_gate_head, p_out, p_lse,
    v_factor, splits,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BM: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program merges ``BD`` dimensions of ``BM`` members (a row of the group with a query head).

    ``lse = max_s lse_s + log2 sum_s 2^(lse_s - max)``, ``out = v_factor * sum_s 2^(lse_s - lse) out_s``.
    All loads begin at once: the parts of rows that a group does not have are read too, and not written.
    """
    start_dependent(DEPENDENT)
    i_group, i_part = tl.program_id(0), tl.program_id(2)
    o_member = tl.program_id(1) * BM + tl.arange(0, BM)
    o_row, o_head = o_member // HQ, o_member % HQ
    GROUP: tl.constexpr = HQ // HKV
    # Where split 0 keeps this row and head, and how far the next split's is: units of one LSE.
    o_first = (i_group * splits).to(tl.int64) * HKV + o_head // GROUP
    o_first = o_first * (ROWS * GROUP) + o_row * GROUP + o_head % GROUP  # [BM]
    o_split = tl.arange(0, BS)
    o_part = o_first[:, None] + o_split[None, :] * (HKV * ROWS * GROUP)  # [BM, BS]
    m_part = (o_row < ROWS)[:, None] & (o_split < splits)[None, :]
    o_dim = i_part * BD + tl.arange(0, BD)
    b_lse = tl.load(p_part_lse + o_part, mask=m_part, other=-float("inf"))
    p_parts = p_part + o_part[:, :, None] * D + o_dim[None, None, :]
    b_part = tl.load(p_parts, mask=m_part[:, :, None], other=0.0)  # [BM, BS, BD]
    m_row = o_row < tl.minimum(tl.load(p_group_rows + i_group), ROWS)
    o_row = (tl.load(p_group_start + i_group) + o_row).to(tl.int64)

    b_largest = tl.max(b_lse, axis=1)
    # Without any token all are -inf: subtracting 0 instead makes every weight 0 and not NaN.
    b_shift = tl.where(b_largest == -float("inf"), 0.0, b_largest)
    b_weight = tl.exp2(b_lse - b_shift[:, None])  # [BM, BS]
    b_total = tl.sum(b_weight, axis=1)
    # A part with NaN makes the total NaN, which stays.
    m_live = m_row & (b_total != 0.0)
    b_divisor = tl.where(m_live, b_total, 1.0)
    b_all = tl.where(m_live, b_shift + tl.log2(b_divisor), -float("inf"))
    # An empty split's part may hold anything.
    b_part = tl.where((b_lse == -float("inf"))[:, :, None], 0.0, b_part)
    b_out = tl.sum(b_part * b_weight[:, :, None], axis=1) * (v_factor / b_divisor)[:, None]  # [BM, BD]

    o_gate = (o_row * stride_gate_row + o_head * stride_gate_head)[:, None] + o_dim[None, :]
    # A row without tokens is 0, whatever its gate holds.
    b_out = gated(b_out, p_gate, o_gate, tl.broadcast_to(m_live[:, None], [BM, BD]))
    o_out = o_row * HQ + o_head
    p_write = p_out + o_out[:, None] * D + o_dim[None, :]
    tl.store(p_write, b_out.to(p_out.dtype.element_ty), mask=tl.broadcast_to(m_row[:, None], [BM, BD]))
    tl.store(p_lse + o_out, b_all * LN2, mask=m_row & (i_part == 0))


@cache
def _adds_in_one_warp(device: torch.device) -> bool:
    """Whether a warp merges a member's splits by itself; before 8.0, sums between warps take longest."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def merge_partials(
    partials: Partials, inputs: AttentionInputs, v_factor: float, out: Tensor, lse: Tensor
) -> None:
    """Merge the splits of every row into ``out [N, Hq, D]`` (gated) and ``lse [N, Hq]`` (natural logarithm).

    ``v_factor`` multiplies the output once, after the merge: parts carry no scale of V. Rows that belong to
    no group are not written.
    """
    plan = inputs.plan
    heads, head_dim = inputs.q.shape[1], inputs.head_dim
    splits = partials.lse.shape[1]
    members = inputs.rows_per_group * heads
    slots = triton.next_power_of_2(splits)
    num_warps = 1 if _adds_in_one_warp(inputs.q.device) else 4
    tile = num_warps * _WARP_TILE
    width = min(head_dim, max(32, tile // slots))
    taken = 1 if num_warps == 1 else min(triton.next_power_of_2(members), max(1, tile // (slots * width)))
    dependent = launches_dependents(inputs.q.device)
    merge_kernel[(inputs.groups, triton.cdiv(members, taken), head_dim // width)](
        partials.out, partials.lse, plan.group_start, plan.group_rows,
        inputs.gate, *inputs.gate_strides, out, lse, v_factor, splits,
        HQ=heads, HKV=inputs.kv_heads, D=head_dim, ROWS=inputs.rows_per_group, BM=taken, BS=slots, BD=width,
        DEPENDENT=dependent, num_warps=num_warps, launch_pdl=dependent,
    )  # fmt: skip
