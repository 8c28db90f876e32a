"""Index scores over paged compressed keys: a group's rows share every key that is read."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.block_plan import BLOCK_TOKENS, RowGroups
from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.errors import InputError
from page4.kernels.index_scores_volta import index_scores_volta_kernel, scores_tiles, volta_can_score
from page4.kernels.qsa_prepare import PAGE_TOKENS

_BLOCKS_PER_PAGE = PAGE_TOKENS // BLOCK_TOKENS
_SMALLEST_DOT = 16  # the least extent of a tensor-core product


@dataclass(frozen=True)
class ScoresConfig:
    """How a call is cut into programs.

    Attributes:
        tile_blocks: keys in registers at once, a power of two from 16 on.
        programs: wanted for a launch: several for every multiprocessor, each with several tiles if it can.
        num_warps, num_stages: Triton's.
    """

    tile_blocks: int
    programs: int
    num_warps: int
    num_stages: int


def on_volta_tensor_cores(index_q: Tensor, compressed_pages: Tensor, rows_per_group: int) -> bool:
    """Whether a call runs :mod:`~page4.kernels.index_scores_volta`: FP16 on compute capability 7.0.

    Its tiles are 8 or 16 keys a warp, and ``num_stages`` means nothing there.
    """
    half = index_q.dtype == compressed_pages.dtype == torch.float16
    if not half or index_q.device.type != "cuda":
        return False
    _, heads, dim = index_q.shape
    volta = torch.cuda.get_device_capability(index_q.device) == (7, 0)
    return volta and volta_can_score(heads, dim, rows_per_group)


def default_scores_config(narrow: bool, volta: bool = False) -> ScoresConfig:
    """The configuration without tuning.

    ``narrow``: queries and keys have 16 bits; ``volta``: :func:`on_volta_tensor_cores`.
    """
    if volta:
        return ScoresConfig(tile_blocks=64, programs=320, num_warps=4, num_stages=1)
    return ScoresConfig(tile_blocks=128 if narrow else 32, programs=1024, num_warps=4, num_stages=3)


@triton.jit
def index_scores_kernel(
    p_queries, stride_query_row, stride_query_head, p_pages, p_tables, stride_table, p_positions,
    p_group_request, p_group_start, p_group_rows, p_scores, stride_scores, splits, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS_PAD: tl.constexpr, BN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program scores every ``splits``-th tile of ``BN`` keys of a group's request, for all its rows.

    Keys are the long side of the product, so that Hopper's wide instructions apply: ``[BN, D] x [D, M]`` with
    ``M = ROWS_PAD * HEADS_PAD`` columns (row of the group, head). Every score is a sum over D and then over
    heads, whatever the tile or the split.
    """
    start_dependent(DEPENDENT)
    i_group, i_split = tl.program_id(0), tl.program_id(1)
    rows = tl.load(p_group_rows + i_group)
    if rows == 0:
        return  # a padding group
    start = tl.load(p_group_start + i_group).to(tl.int64)
    p_table = p_tables + tl.load(p_group_request + i_group).to(tl.int64) * stride_table

    o_row = tl.arange(0, ROWS_PAD)  # [R]
    m_row = o_row < rows
    position = tl.load(p_positions + start + o_row, mask=m_row, other=-1).to(tl.int32)
    visible = (position + 1) // 4  # [R] complete blocks
    longest = tl.max(visible, axis=0)

    o_column = tl.arange(0, ROWS_PAD * HEADS_PAD)  # [M]
    o_member, o_head = o_column // HEADS_PAD, o_column % HEADS_PAD
    o_dim = tl.arange(0, DIM_PAD)
    m_dim = o_dim < DIM
    o_query = (start + o_member) * stride_query_row + o_head * stride_query_head
    m_query = ((o_member < rows) & (o_head < HEADS))[None, :] & m_dim[:, None]
    b_query = tl.load(p_queries + o_query[None, :] + o_dim[:, None], mask=m_query, other=0.0)  # [D, M]
    COMPUTE: tl.constexpr = (
        p_pages.dtype.element_ty if p_pages.dtype.element_ty == p_queries.dtype.element_ty else tl.float32
    )
    b_query = b_query.to(COMPUTE)

    o_tile = tl.arange(0, BN)
    for tile in range(i_split, tl.cdiv(longest, BN), splits):
        o_block = tile * BN + o_tile  # [BN]
        # Table entries and pages past the longest row are stale: they are not read.
        m_block = o_block < longest
        page = tl.load(p_table + o_block // 4, mask=m_block, other=0).to(tl.int64)
        o_key = (page * 4 + o_block % 4) * DIM
        m_key = m_block[:, None] & m_dim[None, :]
        b_key = tl.load(p_pages + o_key[:, None] + o_dim[None, :], mask=m_key, other=0.0)  # [BN, D]
        b_dot = tl.dot(b_key.to(COMPUTE), b_query, input_precision="ieee")  # [BN, M] FP32
        b_score = tl.sum(tl.maximum(b_dot, 0.0).reshape(BN, ROWS_PAD, HEADS_PAD), axis=2) * scale  # [BN, R]
        p_out = p_scores + (start + o_row[None, :]) * stride_scores + o_block[:, None]
        tl.store(p_out, b_score, mask=m_row[None, :] & (o_block[:, None] < visible[None, :]))


def index_scores_triton(
    index_q: Tensor,
    compressed_pages: Tensor,
    block_tables: Tensor,
    positions: Tensor,
    groups: RowGroups,
    scores: Tensor,
    config: ScoresConfig | None = None,
) -> Tensor:
    """Score of every complete block of its request for every row of a step; writes and returns ``scores``.

    Formula: ``score[r, n] = (1 / sqrt(Di)) * sum_h relu(iq[r, h] . K_n)``, FP32 sums; that of
    :func:`~page4.kernels.block_select.index_scores`. Products of two 16-bit inputs of one dtype run on tensor
    cores, all others in FP32.

    Shapes: ``index_q`` is ``[N, Hi, Di]``, ``compressed_pages`` ``[P, 4, Di]`` (block ``b`` of a request lies
    in page ``block_tables[request, b // 4]``), ``block_tables`` int64 or int32 ``[requests, n]``,
    ``positions`` int64 ``[N]`` (-1: a padded row) and ``scores`` FP32 ``[N, NB]``, wide enough for the
    complete blocks of every row. Only the columns below
    ``(positions[r] + 1) // 4`` of row ``r`` are written, and nothing of a row that is in no group. Table
    entries and pages beyond a request's longest row are never read. Nothing synchronises with the host.

    Traffic: a group reads its request's keys once, ``2 Di`` bytes a block in 16 bits, and writes 4 bytes a
    block and row: at Di = 128 and 4 rows, 272 bytes a block.

    Raises:
        InputError: shapes or dtypes that disagree, or a configuration that the GPU's kernel cannot have.
    """
    rows, heads, dim = _check(index_q, compressed_pages, block_tables, positions, scores)
    if rows == 0 or len(groups.rows) == 0:
        return scores
    heads_pad = triton.next_power_of_2(heads)
    rows_pad = max(triton.next_power_of_2(groups.rows_per_group), _SMALLEST_DOT // heads_pad)
    narrow = max(index_q.element_size(), compressed_pages.element_size()) == 2
    volta = on_volta_tensor_cores(index_q, compressed_pages, groups.rows_per_group)
    config = config or default_scores_config(narrow, volta)
    tiles = triton.cdiv(scores.shape[1], config.tile_blocks)
    splits = max(1, min(tiles, triton.cdiv(config.programs, len(groups.rows))))
    if volta:
        if config.tile_blocks not in (8 * config.num_warps, 16 * config.num_warps):
            raise InputError(
                "index scores on compute capability 7.0 take tiles of 8 or 16 keys a warp, "
                f"got {config.tile_blocks} for {config.num_warps} warps"
            )
        index_scores_volta_kernel[(len(groups.rows), splits)](
            index_q, index_q.stride(0), index_q.stride(1), compressed_pages.view(torch.int32),
            block_tables, block_tables.stride(0), positions, groups.request, groups.start, groups.rows,
            scores, scores.stride(0), splits, dim**-0.5,
            HEADS=heads, HEADS_PAD=heads_pad, DIM=dim, ROWS=groups.rows_per_group,
            TILES=scores_tiles(heads, groups.rows_per_group), BN=config.tile_blocks, WARPS=config.num_warps,
            num_warps=config.num_warps,
        )  # fmt: skip
        return scores
    dependent = launches_dependents(index_q.device)
    index_scores_kernel[(len(groups.rows), splits)](
        index_q, index_q.stride(0), index_q.stride(1), compressed_pages, block_tables, block_tables.stride(0),
        positions, groups.request, groups.start, groups.rows, scores, scores.stride(0), splits, dim**-0.5,
        HEADS=heads, DIM=dim, HEADS_PAD=heads_pad, DIM_PAD=max(_SMALLEST_DOT, triton.next_power_of_2(dim)),
        ROWS_PAD=rows_pad, BN=config.tile_blocks, DEPENDENT=dependent,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=dependent,
    )  # fmt: skip
    return scores


def _check(
    index_q: Tensor, compressed_pages: Tensor, block_tables: Tensor, positions: Tensor, scores: Tensor
) -> tuple[int, int, int]:
    if index_q.ndim != 3 or index_q.stride(2) != 1:
        raise InputError(f"index_q must be [N, Hi, Di] with adjacent components, got {list(index_q.shape)}")
    rows, heads, dim = index_q.shape
    if compressed_pages.ndim != 3 or compressed_pages.shape[1:] != (_BLOCKS_PER_PAGE, dim):
        raise InputError(
            f"compressed_pages must be [P, {_BLOCKS_PER_PAGE}, {dim}], got {list(compressed_pages.shape)}"
        )
    if not compressed_pages.is_contiguous():
        raise InputError("compressed_pages must be contiguous")
    if block_tables.ndim != 2 or block_tables.stride(1) != 1:
        raise InputError(
            f"block_tables must be [requests, n] with adjacent pages, got {list(block_tables.shape)}"
        )
    if positions.shape != (rows,):
        raise InputError(f"positions have shape {list(positions.shape)}; {rows} rows need [{rows}]")
    if scores.ndim != 2 or scores.shape[0] != rows or scores.dtype != torch.float32 or scores.stride(1) != 1:
        raise InputError(f"scores must be FP32 [{rows}, blocks], got {scores.dtype} {list(scores.shape)}")
    return rows, heads, dim
