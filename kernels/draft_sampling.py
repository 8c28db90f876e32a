"""Sampling of a draft token, and what verification needs to know about the distribution it came from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kernels.philox import Purpose, random_words
from page4.kernels.sampling_params import SamplingParams
from page4.kernels.token_weights import pick_in_tiles, row_totals


@dataclass(frozen=True)
class DraftDistributions:
    """The distributions that K drafts of R requests were sampled from.

    Everything verification reads about them is stored as the sampler used it, so the two cannot differ.

    Attributes:
        logits: ``[R, K, V]`` as sampled from, with adjacent tokens.
        scale: FP32 ``[R, K]``, ``log2(e) / temperature``; 0: the draft is greedy, and its logits are
            neither stored nor read.
        maximum: FP32 ``[R, K]``, of the logits; NaN where they make no distribution.
        total: int64 ``[R, K]``, sum of the weights (:mod:`~page4.kernels.token_weights`); 0: no distribution,
            and no draft, or a greedy one.
    """

    logits: Tensor
    scale: Tensor
    maximum: Tensor
    total: Tensor

    @classmethod
    def empty(cls, like: Tensor, drafts: int) -> DraftDistributions:
        """Space for K = ``drafts`` distributions of each row of logits ``[R, V]``, in their dtype."""
        requests, vocabulary = like.shape
        return cls(
            like.new_zeros(requests, drafts, vocabulary),
            like.new_zeros(requests, drafts, dtype=torch.float32),
            like.new_zeros(requests, drafts, dtype=torch.float32),
            like.new_zeros(requests, drafts, dtype=torch.int64),
        )

    def first(self, drafts: int) -> DraftDistributions:
        """Those of the first ``drafts`` drafts, the same memory."""
        return DraftDistributions(*(x[:, :drafts] for x in vars(self).values()))


def check_draft_inputs(
    logits: Tensor, positions: Tensor, params: SamplingParams, store: DraftDistributions | None, step: int
) -> None:
    """Refuse what :func:`sample_drafts_reference` does not take."""
    if logits.ndim != 2 or logits.shape[1] < 1 or not logits.dtype.is_floating_point:
        raise InputError(f"logits must be floating point [R, V], got {logits.dtype} {list(logits.shape)}")
    requests = logits.shape[0]
    if positions.shape != (requests,) or positions.dtype != torch.int64:
        raise InputError(
            f"positions must be int64 [{requests}], got {positions.dtype} {list(positions.shape)}"
        )
    if params.scale.shape != (requests,):
        raise InputError(f"sampling parameters are for {len(params.scale)} requests, logits for {requests}")
    if store is None:
        if params.samples_drafts:
            raise InputError("sampled drafts need a place to store their distributions")
        return
    if store.logits.dtype != logits.dtype:
        raise InputError(f"draft logits are {logits.dtype}, their store is {store.logits.dtype}")
    drafts = store.logits.shape[1]
    if store.logits.shape != (requests, drafts, logits.shape[1]):
        raise InputError(f"stored logits have shape {list(store.logits.shape)}, logits {list(logits.shape)}")
    if not 0 <= step < drafts:
        raise InputError(f"step {step} is outside the {drafts} stored drafts")


def sample_drafts_reference(
    logits: Tensor,
    positions: Tensor,
    params: SamplingParams,
    store: DraftDistributions | None = None,
    step: int = 0,
) -> Tensor:
    """Draft token number ``step`` of every request, from the draft's logits at its temperature.

    A request at temperature 0 drafts the argmax (ties: the lower token). A row without a distribution (all
    logits -inf, or NaN or +inf among them) drafts -1.

    Shapes: ``logits`` ``[R, V]``, ``positions`` int64 ``[R]``, of the token to be drafted (-1: a padded
    request, of which nothing is read, drafted (-1) or stored). ``store`` gets everything that verification
    needs at ``[:, step]``; it may be left out when no request samples. Returns int64 ``[R]``.

    Raises:
        InputError: shapes or dtypes that disagree, or no store for a sampled draft.
    """
    check_draft_inputs(logits, positions, params, store, step)
    live = positions >= 0
    tokens = torch.full_like(positions, -1)
    rows, scale = logits[live], params.draft_scale[live]
    totals = row_totals(rows, scale)
    words = random_words(params.seed[live], positions[live], Purpose.DRAFT)
    sampled = pick_in_tiles(totals.tiles, totals.own_weights(rows.shape[1]), words)
    found = torch.where(scale > 0, sampled, rows.float().argmax(1))
    tokens[live] = torch.where(totals.total > 0, found, -1)
    if store is not None:
        sampling = live & (params.draft_scale > 0)
        store.logits[sampling, step] = logits[sampling]
        store.scale[live, step] = scale
        store.maximum[live, step] = torch.where(totals.total > 0, totals.maximum, torch.nan)
        store.total[live, step] = torch.where(scale > 0, totals.total, 0)
    return tokens
