"""The plan of grouped attention as kernels read it: 32-bit lists with one mask word per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from page4.kernels.block_select import BlockPlan
from page4.kernels.errors import InputError

BLOCK_TOKENS = 4  # tokens of a block; a row's share of a mask word is this many bits
MAX_GROUP_ROWS = 8  # 8 rows x 4 tokens fill the 32 bits of a mask word


@dataclass(frozen=True)
class RowGroups:
    """Which adjacent rows of a step share one list of blocks; groups never span requests.

    Attributes:
        request: int32 ``[G]``, the request (row of the block tables); -1 for a padding group.
        start: int32 ``[G]``, the group's first row among the rows of the step.
        rows: int32 ``[G]``, 1..rows_per_group rows; 0 for a padding group.
        rows_per_group: most rows that a group may have, 1..8.
    """

    request: Tensor
    start: Tensor
    rows: Tensor
    rows_per_group: int

    @classmethod
    def of(
        cls,
        row_counts: Sequence[int],
        rows_per_group: int,
        requests: Sequence[int] | None = None,
        groups: int | None = None,
        device: torch.device | str = "cpu",
    ) -> RowGroups:
        """Groups of a step's rows, built on the host.

        ``row_counts[i]`` adjacent rows belong to request ``requests[i]`` (``i`` by default), and are cut into
        ``ceil(row_counts[i] / rows_per_group)`` groups in order; a request's last group may be short. With
        ``groups``, padding groups follow until there are that many, so that a captured graph can be replayed
        with fewer.

        Raises:
            InputError: ``rows_per_group`` outside 1..8, lists of unequal length, or more groups than
                ``groups``.
        """
        check_group_rows(rows_per_group)
        names = range(len(row_counts)) if requests is None else requests
        if len(names) != len(row_counts):
            raise InputError(f"{len(names)} requests do not match {len(row_counts)} row counts")
        triples = []
        first = 0
        for name, count in zip(names, row_counts, strict=True):
            for offset in range(0, count, rows_per_group):
                triples.append((name, first + offset, min(rows_per_group, count - offset)))
            first += count
        total = len(triples) if groups is None else groups
        if len(triples) > total:
            raise InputError(f"the rows form {len(triples)} groups, more than the {total} asked for")
        triples += [(-1, 0, 0)] * (total - len(triples))
        table = torch.tensor(triples, dtype=torch.int32, device=device).view(-1, 3)
        request, start, rows = table.t().contiguous().unbind()
        return cls(request, start, rows, rows_per_group)


@dataclass(frozen=True)
class PackedPlan:
    """What each group of up to 8 adjacent query rows reads, in the form that kernels take.

    Attributes:
        blocks: int32 ``[G, U]``, 4-token blocks (logical, of the sequence), ascending; from ``counts[g]`` on
            undefined.
        counts: int32 ``[G]``, blocks in use per group, at most ``U``.
        masks: int32 ``[G, U]``, the bits of an unsigned word: bit ``4 * m + t`` is set where row ``m`` of the
            group sees token ``t`` of the block; from ``counts[g]`` on undefined.
        group_request: int32 ``[G]``, the request, a row of the block tables; -1 for a padding group.
        group_start: int32 ``[G]``, the group's first row among the rows of the step.
        group_rows: int32 ``[G]``, rows of the group.
    """

    blocks: Tensor
    counts: Tensor
    masks: Tensor
    group_request: Tensor
    group_start: Tensor
    group_rows: Tensor


def check_group_rows(rows_per_group: int) -> None:
    """Refuse a group that a mask word cannot hold.

    Raises:
        InputError: ``rows_per_group`` outside 1..8.
    """
    if not 1 <= rows_per_group <= MAX_GROUP_ROWS:
        raise InputError(f"rows_per_group must lie in 1..{MAX_GROUP_ROWS}, got {rows_per_group}")


def plan_capacity(rows_per_group: int, topk: int, max_blocks: int) -> int:
    """Most blocks that one group can list: every row's top-k and tail, but no more than there are.

    ``max_blocks`` counts the blocks of the longest sequence, an incomplete last one included.
    """
    return min(rows_per_group * (topk + 1), max_blocks)


def pack_plan(plan: BlockPlan, rows: int, requests: int = 1, capacity: int | None = None) -> PackedPlan:
    """The packed form of a reference plan.

    The plan covers ``rows`` rows of ``requests`` requests, ``rows / requests`` rows each, in order. Padding
    entries become block -1 with mask 0. ``capacity`` widens the lists to that many columns.

    Raises:
        InputError: blocks of other than 4 tokens, groups of more than 8 rows, a plan of another number of
            rows, or a ``capacity`` below the longest list.
    """
    groups, longest, rows_per_group, ratio = plan.token_mask.shape
    if ratio != BLOCK_TOKENS:
        raise InputError(f"packed plans hold blocks of {BLOCK_TOKENS} tokens, got {ratio}")
    check_group_rows(rows_per_group)
    if requests < 1 or rows % requests:
        raise InputError(f"{rows} rows do not divide into {requests} requests")
    device = plan.blocks.device
    each = RowGroups.of([rows // requests] * requests, rows_per_group, device=device)
    if len(each.request) != groups:
        raise InputError(f"the plan covers {groups} groups; {rows} rows form {len(each.request)}")
    width = longest if capacity is None else capacity
    if width < longest:
        raise InputError(f"capacity {width} is below the longest list, {longest} blocks")

    bits = plan.token_mask.flatten(2)  # [G, U, M * 4], bit 4 m + t
    weights = 2 ** torch.arange(bits.shape[2], device=device)
    words = (bits * weights).sum(dim=2)  # int64: no bit is a sign yet
    masks = torch.where(words >= 2**31, words - 2**32, words)
    return PackedPlan(
        blocks=pad(plan.blocks, (0, width - longest), value=-1).int(),
        counts=plan.counts.int(),
        masks=pad(masks, (0, width - longest)).int(),
        group_request=each.request,
        group_start=each.start,
        group_rows=each.rows,
    )
