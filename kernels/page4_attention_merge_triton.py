"""The parts that splits of grouped attention leave behind, and the kernel that merges them."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kernels.page4_attention_inputs import AttentionInputs

MAX_SPLITS = 64
_CHUNK_SPLITS = 8  # splits that a program of the merge holds in registers at once


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
    BS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program merges one query head of one row.

    ``lse = max_s lse_s + log2 sum_s 2^(lse_s - max)``, ``out = v_factor * sum_s 2^(lse_s - lse) out_s``.
    """
    i_group, i_row, i_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i_row >= tl.load(p_group_rows + i_group):
        return
    GROUP: tl.constexpr = HQ // HKV
    # Where split 0 keeps this row and head, and how far the next split's is: units of one LSE.
    o_first = (i_group * splits).to(tl.int64) * HKV + i_head // GROUP
    o_first = o_first * (ROWS * GROUP) + i_row * GROUP + i_head % GROUP
    SPLIT_STRIDE: tl.constexpr = HKV * ROWS * GROUP

    o_split = tl.arange(0, BS)
    b_all = tl.load(
        p_part_lse + o_first + o_split * SPLIT_STRIDE, mask=o_split < splits, other=-float("inf")
    )  # [BS]
    largest = tl.max(b_all, axis=0)
    # Without any token all are -inf: subtracting 0 instead makes every weight 0 and not NaN.
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp2(b_all - shift), axis=0)
    divisor = tl.where(total > 0.0, total, 1.0)
    lse = tl.where(total > 0.0, shift + tl.log2(divisor), -float("inf"))

    o_dim = tl.arange(0, D)
    b_out = tl.zeros([D], dtype=tl.float32)
    for start in range(0, splits, CHUNK):
        o_some = start + tl.arange(0, CHUNK)
        o_part = o_first + o_some * SPLIT_STRIDE  # [CHUNK]
        b_lse = tl.load(p_part_lse + o_part, mask=o_some < splits, other=-float("inf"))
        # An empty split's part may hold anything.
        m_live = (b_lse > -float("inf"))[:, None]
        b_part = tl.load(p_part + o_part[:, None] * D + o_dim[None, :], mask=m_live, other=0.0)  # [CHUNK, D]
        b_out += tl.sum(b_part * tl.exp2(b_lse - shift)[:, None], axis=0)  # [D]

    row = (tl.load(p_group_start + i_group) + i_row).to(tl.int64)
    o_gate = row * stride_gate_row + i_head * stride_gate_head + o_dim  # [D]
    # A row without tokens is 0, whatever its gate holds.
    b_out = gated(b_out * (v_factor / divisor), p_gate, o_gate, tl.broadcast_to(total > 0.0, [D]))
    o_out = row * HQ + i_head
    tl.store(p_out + o_out * D + o_dim, b_out.to(p_out.dtype.element_ty))
    tl.store(p_lse + o_out, lse * LN2)


def merge_partials(
    partials: Partials, inputs: AttentionInputs, v_factor: float, out: Tensor, lse: Tensor
) -> None:
    """Merge the splits of every row into ``out [N, Hq, D]`` (gated) and ``lse [N, Hq]`` (natural logarithm).

    ``v_factor`` multiplies the output once, after the merge: parts carry no scale of V. Rows that belong to
    no group are not written.
    """
    plan = inputs.plan
    heads = inputs.q.shape[1]
    splits = partials.lse.shape[1]
    slots = triton.next_power_of_2(splits)
    merge_kernel[(inputs.groups, inputs.rows_per_group, heads)](
        partials.out, partials.lse, plan.group_start, plan.group_rows,
        inputs.gate, *inputs.gate_strides, out, lse, v_factor, splits,
        HQ=heads, HKV=inputs.kv_heads, D=inputs.head_dim, ROWS=inputs.rows_per_group,
        BS=slots, CHUNK=min(slots, _CHUNK_SPLITS), num_warps=2,
    )  # fmt: skip
