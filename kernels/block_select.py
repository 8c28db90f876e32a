"""Selection of key blocks: index scores, the exact top-k, and the union of what adjacent rows read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from page4.kernels.errors import InputError

_SCORE_ROWS = 128


def index_scores(iq: Tensor, compressed: Tensor) -> Tensor:
    """Score of every compressed key block for every query row.

    Formula: ``score[r, b] = (1 / sqrt(Di)) * sum_h relu(iq[r, h] . compressed[b])``; there are no learned
    head weights, so a row whose heads all point away from a block scores exactly 0.

    Shapes: ``iq`` is ``[R, Hi, Di]`` (normed and rotated), ``compressed`` is ``[nb, Di]`` in block order.
    Returns FP32 ``[R, nb]`` (FP64 for float64 inputs).

    Raises:
        InputError: the index dimensions differ.

    Source: Qwen4Exp QSA indexer.
    """
    dim = iq.shape[-1]
    if iq.ndim != 3 or compressed.ndim != 2 or compressed.shape[1] != dim:
        raise InputError(f"compressed keys have shape {list(compressed.shape)}; need [nb, {dim}]")
    compute = torch.promote_types(iq.dtype, torch.float32)
    queries, keys = iq.to(compute), compressed.to(compute).mT
    # Per-head scores are Hi times the result; a tile of rows keeps them small.
    tiles = [torch.relu_(tile @ keys).sum(dim=1) / math.sqrt(dim) for tile in queries.split(_SCORE_ROWS)]
    return torch.cat(tiles)


def select_blocks(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Exact top-k of the visible blocks of every row.

    Row ``r`` selects ``min(topk, visible[r])`` of the blocks ``0 .. visible[r] - 1``: score descending, then
    lower block index. -0.0 and +0.0 are equal. ReLU scores make ties at exactly 0 common, so the tie rule is
    part of the definition and not a detail of the sort.

    Shapes: ``scores`` is ``[R, nb]`` without NaN, ``visible`` is int64 ``[R]`` in ``0..nb``. Returns bool
    ``[R, nb]``.

    Raises:
        InputError: shapes that disagree, ``topk`` below 1, or a visible count outside ``0..nb``.
    """
    rows, num_blocks = scores.shape
    if visible.shape != (rows,):
        raise InputError(f"visible has shape {list(visible.shape)}; {rows} rows need [{rows}]")
    if topk < 1:
        raise InputError(f"topk must be at least 1, got {topk}")
    if bool(((visible < 0) | (visible > num_blocks)).any()):
        raise InputError(f"visible counts must lie in 0..{num_blocks}")
    allowed = torch.arange(num_blocks, device=scores.device) < visible[:, None]  # [R, nb]
    crowded = (visible > topk).nonzero().squeeze(1)  # the rows that must choose
    if len(crowded) == 0:
        return allowed
    choice = allowed[crowded]
    ranked = scores[crowded].masked_fill_(~choice, -torch.inf)
    top_values = ranked.topk(topk, sorted=False).values
    kth_value = top_values.amin(dim=1, keepdim=True)
    choice &= ranked >= kth_value
    # Where more blocks tie at the k-th value than places are left, the first of them win.
    contested = (choice.sum(dim=1) > topk).nonzero().squeeze(1)
    if len(contested):
        tied = choice[contested] & (ranked[contested] == kth_value[contested])
        places = topk - (top_values[contested] > kth_value[contested]).sum(dim=1, keepdim=True)
        too_late = tied & (tied.cumsum(dim=1, dtype=torch.int32) > places)
        choice[contested] &= ~too_late
    allowed[crowded] = choice
    return allowed


@dataclass(frozen=True)
class BlockPlan:
    """What each group of adjacent query rows reads: one ascending list of 4-token blocks, and who sees what.

    Attributes:
        blocks: int64 ``[G, U]``, block indices (logical, of the sequence), ascending, padded with -1.
        counts: int64 ``[G]``, blocks in use per group.
        token_mask: bool ``[G, U, M, ratio]``, true where row ``m`` of the group attends to that token of the
            block; false for padding blocks and for the missing rows of a short last group.
    """

    blocks: Tensor
    counts: Tensor
    token_mask: Tensor


def union_plan(selected: Tensor, positions: Tensor, rows_per_group: int, ratio: int = 4) -> BlockPlan:
    """Merge the selections of adjacent rows, so that a key block is read once for all rows of a group.

    Row ``r`` at position ``p`` reads its selected complete blocks and the tail tokens
    ``ratio * ((p + 1) // ratio) .. p`` (none when ``p + 1`` is a multiple of ``ratio``). A position of -1 is
    a padded row, which reads nothing. Tokens after a row's position are never visible to it, whatever is
    selected.

    Shapes: ``selected`` is bool ``[R, nb]``, ``positions`` int64 ``[R]``. Rows are grouped in order,
    ``G = ceil(R / rows_per_group)`` and ``M = rows_per_group``; the last group may be short.

    Raises:
        InputError: shapes that disagree, or ``rows_per_group`` below 1.
    """
    rows, num_blocks = selected.shape
    if positions.shape != (rows,):
        raise InputError(f"positions have shape {list(positions.shape)}; {rows} rows need [{rows}]")
    if rows_per_group < 1:
        raise InputError(f"rows_per_group must be at least 1, got {rows_per_group}")
    device = selected.device
    complete = (positions + 1) // ratio  # [R] complete blocks, also the index of the tail block
    has_tail = (positions + 1) % ratio != 0
    width = max(num_blocks, int((complete + has_tail).max()) if rows else 0)
    groups = -(-rows // rows_per_group)

    member = torch.zeros(groups * rows_per_group, width, dtype=torch.bool, device=device)
    member[:rows, :num_blocks] = selected
    tail_rows = has_tail.nonzero().squeeze(1)
    member[tail_rows, complete[tail_rows]] = True
    member = rearrange(member, "(g m) b -> g m b", m=rows_per_group)

    in_union = member.any(dim=1)  # [G, width]
    counts = in_union.sum(dim=1)
    longest = int(counts.max()) if groups else 0
    group, block = in_union.nonzero(as_tuple=True)  # ordered by group, then block
    rank = torch.arange(len(group), device=device) - (counts.cumsum(0) - counts)[group]
    blocks = torch.full((groups, longest), -1, dtype=torch.int64, device=device)
    blocks[group, rank] = block

    last_position = positions.new_full((groups * rows_per_group,), -1)
    last_position[:rows] = positions
    token = block[:, None] * ratio + torch.arange(ratio, device=device)  # [n, ratio]
    reached = token[:, None] <= last_position.view(groups, rows_per_group)[group][..., None]  # [n, M, ratio]
    token_mask = torch.zeros(groups, longest, rows_per_group, ratio, dtype=torch.bool, device=device)
    token_mask[group, rank] = reached & member[group, :, block][..., None]
    return BlockPlan(blocks=blocks, counts=counts, token_mask=token_mask)
