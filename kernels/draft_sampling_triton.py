"""Draft sampling in two launches: the sums of every tile, then a tile and a token in it."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from page4.kernels.dependent_launch import launches_dependents, start_dependent
from page4.kernels.draft_sampling import DraftDistributions, check_draft_inputs
from page4.kernels.errors import InputError
from page4.kernels.philox import Purpose
from page4.kernels.sampling_params import SamplingParams
from page4.kernels.token_weights import ONE_IN_TILE, TILE
from page4.kernels.token_weights_triton import (
    check_on,
    draw_below,
    fixed_point,
    launch_tile_sums,
    load_logits,
    next_tiles,
    random_words,
    relative_power,
    row_maximum,
    tiles_in_row,
)

_ONE_IN_TILE = tl.constexpr(ONE_IN_TILE)
_DRAFT = tl.constexpr(int(Purpose.DRAFT))


@triton.jit
def choose_draft_kernel(
    p_logits, stride_request, p_positions, p_scale, p_seed, p_tile_max, p_tile_sum,
    p_store_scale, p_store_max, p_store_total, stride_store, p_tokens, vocabulary, tiles,
    TILE: tl.constexpr, TILES_PAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program draws the token of one request."""
    start_dependent(DEPENDENT)
    i_request = tl.program_id(0).to(tl.int64)
    position = tl.load(p_positions + i_request)
    if position < 0:
        return  # a padded request
    scale = tl.load(p_scale + i_request)
    o_tile = tl.arange(0, TILES_PAD)
    m_tile = o_tile < tiles
    b_tile_max = tl.load(p_tile_max + i_request * tiles + o_tile, mask=m_tile, other=-float("inf"))
    b_own = tl.load(p_tile_sum + i_request * tiles + o_tile, mask=m_tile, other=0)
    maximum, valid = row_maximum(b_tile_max)
    token = tl.full([], -1, tl.int64)
    total = tl.full([], 0, tl.int64)
    if valid:
        if scale == 0.0:
            i_tile = tl.min(tl.where(b_tile_max == maximum, o_tile, TILES_PAD), axis=0)
            token = tl.sum(tl.where(o_tile == i_tile, b_own, 0), axis=0)
        else:
            b_tiles = tiles_in_row(b_own, b_tile_max, maximum, scale)
            total = tl.sum(b_tiles, axis=0)
            x0, x1, x2, x3 = random_words(
                tl.load(p_seed + i_request), position, tl.full([], _DRAFT, tl.int32)
            )
            b_passed = tl.cumsum(b_tiles, axis=0) <= draw_below(x0, x1, total)
            i_tile = tl.sum(b_passed.to(tl.int32), axis=0)
            tile_max = tl.load(p_tile_max + i_request * tiles + i_tile)
            o_token = i_tile * TILE + tl.arange(0, TILE)
            b_logit = load_logits(p_logits + i_request * stride_request, None, o_token, vocabulary)
            b_weight = fixed_point(relative_power(b_logit, tile_max, scale), _ONE_IN_TILE)
            b_passed = tl.cumsum(b_weight, axis=0) <= draw_below(x2, x3, tl.sum(b_weight, axis=0))
            token = (i_tile * TILE + tl.sum(b_passed.to(tl.int32), axis=0)).to(tl.int64)
    tl.store(p_tokens + i_request, token)
    if p_store_scale is not None:
        o_store = i_request * stride_store
        tl.store(p_store_scale + o_store, scale)
        tl.store(p_store_max + o_store, tl.where(valid, maximum, float("nan")))
        tl.store(p_store_total + o_store, total)


@dataclass(frozen=True)
class DraftWorkspace:
    """What the two launches pass on: FP32 and int64 ``[R, T]``. Not for two streams at once."""

    tile_max: Tensor
    tile_sum: Tensor

    @classmethod
    def allocate(cls, requests: int, vocabulary: int, device: torch.device | str = "cpu") -> DraftWorkspace:
        """Space for up to ``requests`` requests over a vocabulary."""
        shape = (requests, triton.cdiv(vocabulary, TILE))
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int64, device=device),
        )


def sample_drafts_triton(
    logits: Tensor,
    positions: Tensor,
    params: SamplingParams,
    workspace: DraftWorkspace,
    store: DraftDistributions | None = None,
    step: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """The tokens of :func:`~page4.kernels.draft_sampling.sample_drafts_reference`, bit for bit.

    ``logits`` may be padded views as long as tokens are adjacent, also the view ``store.logits[:, step]``
    itself. ``out`` is int64 ``[R]``, of which padded requests' entries stay as they are; without it they are
    -1. Nothing synchronises with the host, and with ``out`` nothing is allocated.

    Raises:
        InputError: shapes, dtypes, devices or strides that disagree, no store for a sampled draft, or a
            workspace that is too small.
    """
    check_draft_inputs(logits, positions, params, store, step)
    requests, vocabulary = logits.shape
    out = torch.full_like(positions, -1) if out is None else out
    if out.shape != (requests,) or out.dtype != torch.int64 or not out.is_contiguous():
        raise InputError(f"out must be contiguous int64 [{requests}], got {out.dtype} {list(out.shape)}")
    tiles = triton.cdiv(vocabulary, TILE)
    if workspace.tile_max.shape[0] < requests or workspace.tile_max.shape[1] != tiles:
        raise InputError(
            f"the workspace is for {list(workspace.tile_max.shape)} rows and tiles, need {[requests, tiles]}"
        )
    stored = (None, None, None, None) if store is None else (
        store.logits[:, step], store.scale[:, step], store.maximum[:, step], store.total[:, step]
    )  # fmt: skip
    check_on(logits.device, logits=logits, positions=positions, out=out, store=stored[0])
    if store is not None and not (store.scale.stride() == store.maximum.stride() == store.total.stride()):
        raise InputError("scale, maximum and total of the stored distributions must have the same strides")
    if requests == 0:
        return out
    copied = stored[0]
    if copied is not None and copied.data_ptr() == logits.data_ptr() and copied.stride() == logits.stride():
        copied = None  # already there
    launch_tile_sums(
        logits[:, None], positions, params.draft_scale, None, copied, workspace.tile_max, workspace.tile_sum
    )
    dependent = launches_dependents(logits.device)
    choose_draft_kernel[(requests,)](
        logits, logits.stride(0), positions, params.draft_scale, params.seed,
        workspace.tile_max, workspace.tile_sum, *stored[1:], 0 if store is None else store.scale.stride(0),
        out, vocabulary, tiles, TILE=TILE, TILES_PAD=next_tiles(vocabulary), DEPENDENT=dependent,
        num_warps=4, enable_fp_fusion=False, launch_pdl=dependent,
    )  # fmt: skip
    return out
