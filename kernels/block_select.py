"""Selection of key blocks: index scores, the exact top-k, and the union of what adjacent rows read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from page4.kernels.errors import InputError

# Per-head scores are Hi times the result; tiles of rows keep them near a CPU's cache, or fill a GPU.
_TILE_ELEMENTS = {"cpu": 2**21, "cuda": 2**28}


def index_scores(iq: Tensor, compressed: Tensor) -> Tensor:
    """Score of every compressed key block for every query row of B requests.

    Formula: ``score[b, t, n] = (1 / sqrt(Di)) * sum_h relu(iq[b, t, h] . compressed[b, n])``; there are no
    learned head weights, so a row whose heads all point away from a block scores exactly 0.

    Shapes: ``iq`` is ``[B, T, Hi, Di]`` (normed and rotated), ``compressed`` is ``[B, nb, Di]`` in block
    order. Returns FP32 ``[B, T, nb]`` (FP64 for float64 inputs).

    Raises:
        InputError: the number of requests or the index dimensions differ.

    Source: Qwen4Exp QSA indexer.
    """
    if iq.ndim != 4 or compressed.ndim != 3 or compressed.shape[::2] != (iq.shape[0], iq.shape[3]):
        raise InputError(
            "index queries and compressed keys must be [B, T, Hi, Di] and [B, nb, Di], "
            f"got {list(iq.shape)} and {list(compressed.shape)}"
        )
    batch, rows, heads, dim = iq.shape
    compute = torch.promote_types(iq.dtype, torch.float32)
    queries, keys = iq.to(compute), compressed.to(compute).mT
    limit = _TILE_ELEMENTS.get(iq.device.type, _TILE_ELEMENTS["cpu"])
    tile_rows = max(1, limit // max(1, batch * heads * keys.shape[2]))
    out = torch.empty(batch, rows, keys.shape[2], dtype=compute, device=iq.device)
    for start in range(0, rows, tile_rows):
        tile = queries[:, start : start + tile_rows].flatten(1, 2)  # [B, t * Hi, Di]
        per_head = torch.relu_(tile @ keys).unflatten(1, (-1, heads))
        torch.sum(per_head, dim=2, out=out[:, start : start + tile_rows])
    return out.mul_(dim**-0.5)


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


def union_plan(
    selected: Tensor, positions: Tensor, rows_per_group: int, ratio: int = 4, requests: int = 1
) -> BlockPlan:
    """Merge the selections of adjacent rows, so that a key block is read once for all rows of a group.

    Row ``r`` at position ``p`` reads its selected complete blocks and the tail tokens
    ``ratio * ((p + 1) // ratio) .. p`` (none when ``p + 1`` is a multiple of ``ratio``). A position of -1 is
    a padded row, which reads nothing. Tokens after a row's position are never visible to it, whatever is
    selected.

    Shapes: ``selected`` is bool ``[R, nb]``, ``positions`` int64 ``[R]``, the rows of ``requests`` requests
    with ``T = R / requests`` each. A request's rows are grouped in order, ``ceil(T / M)`` groups of
    ``M = rows_per_group``; its last group may be short. Groups never span requests.

    Raises:
        InputError: shapes that disagree, ``rows_per_group`` below 1, or rows that do not divide evenly.
    """
    rows, num_blocks = selected.shape
    if positions.shape != (rows,):
        raise InputError(f"positions have shape {list(positions.shape)}; {rows} rows need [{rows}]")
    if rows_per_group < 1:
        raise InputError(f"rows_per_group must be at least 1, got {rows_per_group}")
    if requests < 1 or rows % requests:
        raise InputError(f"{rows} rows do not divide into {requests} requests")
    device = selected.device
    complete = (positions + 1) // ratio  # [R] complete blocks, also the index of the tail block
    has_tail = (positions + 1) % ratio != 0
    width = max(num_blocks, int((complete + has_tail).max()) if rows else 0)
    padding = -(rows // requests) % rows_per_group

    member = torch.zeros(rows, width, dtype=torch.bool, device=device)
    member[:, :num_blocks] = selected
    tail_rows = has_tail.nonzero().squeeze(1)
    member[tail_rows, complete[tail_rows]] = True
    if padding:
        member = pad(member.view(requests, -1, width), (0, 0, 0, padding))
        positions = pad(positions.view(requests, -1), (0, padding), value=-1)
    member = member.view(-1, rows_per_group, width)  # [G, M, width]
    last_position = positions.reshape(-1, rows_per_group, 1)  # [G, M, 1]

    groups = member.shape[0]
    in_union = member.any(dim=1)  # [G, width]
    counts = in_union.sum(dim=1)
    longest = int(counts.max()) if groups else 0
    group, block = in_union.nonzero(as_tuple=True)  # ordered by group, then block
    rank = torch.arange(len(group), device=device) - (counts.cumsum(0) - counts)[group]
    blocks = torch.full((groups, longest), -1, dtype=torch.int64, device=device)
    blocks[group, rank] = block

    token = block[:, None] * ratio + torch.arange(ratio, device=device)  # [n, ratio]
    reached = token[:, None] <= last_position[group]  # [n, M, ratio]
    token_mask = torch.zeros(groups, longest, rows_per_group, ratio, dtype=torch.bool, device=device)
    token_mask[group, rank] = reached & member[group, :, block][..., None]
    return BlockPlan(blocks=blocks, counts=counts, token_mask=token_mask)
