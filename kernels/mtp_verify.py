"""Verification of a speculative draft: which drafted tokens the target accepts, and what is emitted."""

from __future__ import annotations

import torch
from torch import Tensor

from page4.kernels.draft_sampling import DraftDistributions
from page4.kernels.errors import InputError
from page4.kernels.philox import Purpose, random_words, uniform
from page4.kernels.sampling_params import SamplingParams
from page4.kernels.token_weights import (
    ONE,
    ONE_IN_TILE,
    RowTotals,
    inverse_total,
    pick_in_tiles,
    power_of_two,
    relative_exponents,
    row_totals,
    tile_sums,
)

MAX_DRAFTS = 7  # a decode step has at most 8 rows per request


def verify_greedy_reference(target_tokens: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of the draft that greedy decoding of the target would have produced.

    ``target_tokens[b, j]`` is the target's argmax after the verify row that holds draft ``j`` (row 0 holds
    the last accepted token), so draft ``j + 1`` is accepted when it equals ``target_tokens[b, j]`` and every
    earlier draft was accepted. A draft of -1 (nothing was drafted there) ends the prefix. The token after the
    accepted prefix is the target's own: the bonus token when all drafts are accepted, the correction
    otherwise.

    Shapes: ``target_tokens`` is int64 ``[B, K + 1]``, ``drafts`` is int64 ``[B, K]`` (``K = 0`` is plain
    greedy decoding). Returns ``accepted`` as int64 ``[B]`` in ``0..K`` and ``emitted`` as int64
    ``[B, K + 1]``: the ``accepted + 1`` tokens of this step, then -1.

    Raises:
        InputError: shapes that disagree.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), greedy case.
    """
    batch, num_drafts = drafts.shape
    if target_tokens.shape != (batch, num_drafts + 1):
        raise InputError(
            f"target_tokens has shape {list(target_tokens.shape)}; needs {[batch, num_drafts + 1]}"
        )
    matches = (drafts == target_tokens[:, :num_drafts]) & (drafts >= 0)
    accepted = matches.long().cumprod(dim=1).sum(dim=1)
    column = torch.arange(num_drafts + 1, device=drafts.device)
    # Accepted drafts equal the target's tokens, so one select covers the prefix and the token after it.
    emitted = torch.where(column <= accepted[:, None], target_tokens, -1)
    return accepted, emitted


def check_verify_inputs(
    logits: Tensor,
    drafts: Tensor,
    positions: Tensor,
    params: SamplingParams,
    distributions: DraftDistributions | None,
    allowed: Tensor | None,
) -> tuple[int, int, int]:
    """Refuse what :func:`verify_reference` does not take; returns R, K and V."""
    if logits.ndim != 3 or logits.shape[2] < 1 or not logits.dtype.is_floating_point:
        raise InputError(
            f"logits must be floating point [R, K+1, V], got {logits.dtype} {list(logits.shape)}"
        )
    requests, rows, vocabulary = logits.shape
    if not 1 <= rows <= MAX_DRAFTS + 1:
        raise InputError(f"{rows} rows a request, expected 1 to {MAX_DRAFTS + 1}")
    if drafts.shape != (requests, rows - 1) or drafts.dtype != torch.int64:
        raise InputError(
            f"drafts must be int64 {[requests, rows - 1]}, got {drafts.dtype} {list(drafts.shape)}"
        )
    if positions.shape != (requests,) or positions.dtype != torch.int64:
        raise InputError(
            f"positions must be int64 [{requests}], got {positions.dtype} {list(positions.shape)}"
        )
    if params.scale.shape != (requests,):
        raise InputError(f"sampling parameters are for {len(params.scale)} requests, logits for {requests}")
    if distributions is None:
        if params.samples_drafts and rows > 1:
            raise InputError("sampled drafts need the distributions that they were sampled from")
    elif distributions.logits.shape != (requests, rows - 1, vocabulary):
        raise InputError(
            f"draft logits have shape {list(distributions.logits.shape)}, "
            f"need {[requests, rows - 1, vocabulary]}"
        )
    if allowed is not None:
        words = -(-vocabulary // 32)
        if allowed.shape != (requests, rows, words) or allowed.dtype != torch.int32:
            raise InputError(
                f"allowed must be int32 {[requests, rows, words]}, got {allowed.dtype} {list(allowed.shape)}"
            )
    return requests, rows - 1, vocabulary


def allowed_tokens(allowed: Tensor, vocabulary: int) -> Tensor:
    """Bits ``[..., W]`` of int32 words, the lowest first, as bool ``[..., vocabulary]``."""
    bits = (allowed[..., None] >> torch.arange(32, dtype=torch.int32, device=allowed.device)) & 1
    return bits.flatten(-2)[..., :vocabulary].bool()


def kept_tokens(
    logits: Tensor, totals: RowTotals, scale: Tensor, top_k: Tensor, top_p: Tensor, log2_min_p: Tensor
) -> Tensor:
    """Which tokens the filters keep of logits ``[N, V]`` (excluded tokens: -inf), as bool ``[N, V]``.

    ``totals`` are the logits' own (:func:`~page4.kernels.token_weights.row_totals`).

    Tokens in the order of their logits, descending, ties to the lower token:

    1. min-p keeps those whose probability is at least ``min_p`` times the greatest one.
    2. top-k keeps the first k of them.
    3. top-p keeps the fewest of those, from the first one on, whose probabilities sum up to ``top_p`` of the
       sum over all that are left. The first one always stays.

    Parameters are ``[N]``; :class:`~page4.kernels.sampling_params.SamplingParams` says what they mean.
    """
    # Adding 0 makes -0.0 equal to +0.0, which a sort might not.
    order = (logits.float() + 0.0).sort(dim=1, descending=True, stable=True).indices
    ordered = logits.float().gather(1, order)
    maximum = totals.maximum[:, None]
    greatest = relative_exponents(maximum, maximum, scale[:, None])
    exponent = relative_exponents(ordered, maximum, scale[:, None])
    left = (ordered > -torch.inf) & (exponent >= greatest + log2_min_p[:, None])
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(top_k < logits.shape[1], top_k, 0)
    left &= (top_k[:, None] == 0) | (rank < top_k[:, None])
    # A row without a distribution keeps nothing that counts.
    weight = torch.where(left & maximum.isfinite(), (power_of_two(exponent) * ONE).long(), 0)
    ends = weight.cumsum(1)
    # Only without other filters is a row's sum known before its tokens are looked at again.
    whole = (top_k == 0) & (log2_min_p == -torch.inf)
    total = torch.where(whole, totals.total, ends[:, -1])
    needed = (total.double() * top_p.double()).long().clamp_min(1).minimum(ends[:, -1])
    left &= (top_p[:, None] >= 1) | (ends - weight < needed[:, None])
    return torch.zeros_like(left).scatter(1, order, left)


def verify_reference(
    logits: Tensor,
    drafts: Tensor,
    positions: Tensor,
    params: SamplingParams,
    distributions: DraftDistributions | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verify K drafts of each request so that what is emitted follows the target's distribution exactly.

    Row ``j`` of a request decides on draft ``j`` (row K: on the token after all drafts). With ``p`` the
    target's distribution of that token, after temperature and filters, and ``q`` the draft's:

    - A draft d is accepted with probability ``min(1, p(d) / q(d))`` if all before it were. A greedy draft has
      ``q(d) = 1``. At temperature 0 it is accepted if it is the argmax.
    - The first rejected one is replaced by a token from ``max(p - q, 0)``, normalised; where nothing was
      drafted (-1, or no token of the vocabulary), by one from ``p``. Nothing after it is verified.
    - When all are accepted, a token from row K's ``p`` follows.

    Probabilities are exact up to the rounding of FP32 weights, which :mod:`~page4.kernels.token_weights`
    defines. Random numbers depend on a request's seed, the position and the purpose alone
    (:mod:`~page4.kernels.philox`).

    A row without a distribution (no token allowed, all logits -inf, or NaN or +inf among the allowed ones)
    accepts nothing and emits -1 in its place.

    Shapes: ``logits`` ``[R, K + 1, V]``; ``drafts`` int64 ``[R, K]``, K up to 7; ``positions`` int64 ``[R]``,
    of the first draft token (-1: a padded request, of which nothing is read); ``allowed`` int32
    ``[R, K + 1, ceil(V / 32)]``, a bit per token, the lowest first, of those that may be emitted. Returns
    ``accepted`` int64 ``[R]`` (-1: padded) and ``emitted`` int64 ``[R, K + 1]``: the accepted drafts, one
    more token, and then -1.

    Raises:
        InputError: shapes or dtypes that disagree, or no distributions for sampled drafts.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023); Chen et al.,
    Accelerating Large Language Model Decoding with Speculative Sampling (2023).
    """
    check_verify_inputs(logits, drafts, positions, params, distributions, allowed)
    accepted = torch.full_like(positions, -1)
    emitted = torch.full(logits.shape[:2], -1, dtype=torch.int64, device=logits.device)
    live = positions >= 0
    if not live.any():
        return accepted, emitted
    logits = logits[live].float()
    if allowed is not None:
        logits = logits.masked_fill(~allowed_tokens(allowed[live], logits.shape[2]), -torch.inf)
    accepted[live], emitted[live] = _verify_live(logits, drafts, positions, params, distributions, live)
    return accepted, emitted


def _verify_live(
    logits: Tensor,
    drafts: Tensor,
    positions: Tensor,
    params: SamplingParams,
    distributions: DraftDistributions | None,
    live: Tensor,
) -> tuple[Tensor, Tensor]:
    requests, rows, vocabulary = logits.shape
    num_drafts = rows - 1
    flat = logits.flatten(0, 1)
    scale, top_k, top_p, log2_min_p, seed = (
        x[live].repeat_interleave(rows)
        for x in (params.scale, params.top_k, params.top_p, params.log2_min_p, params.seed)
    )
    position = (positions[live, None] + torch.arange(rows, device=logits.device)).flatten()
    draft = torch.nn.functional.pad(drafts[live], (0, 1), value=-1).flatten()  # row K has none
    draft = torch.where((draft >= 0) & (draft < vocabulary), draft, -1)

    totals = row_totals(flat, scale)
    best = flat.argmax(1)
    # Without filters the tiles' sums serve; with them, and for p - q, weights are relative to the row.
    filtered = ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1) | (log2_min_p > -torch.inf)
    kept = kept_tokens(flat, totals, scale, top_k, top_p, log2_min_p) | ~filtered[:, None]
    power = power_of_two(relative_exponents(flat, totals.maximum[:, None], scale[:, None])) * kept
    total = torch.where(filtered & (totals.total > 0), (power * ONE).long().sum(1), totals.total)
    p = torch.where(flat > -torch.inf, power * inverse_total(total)[:, None], 0.0)

    q = torch.zeros_like(p)
    if distributions is not None and num_drafts:
        rows_of_drafts = torch.arange(requests * rows, device=logits.device).view(requests, rows)[:, :-1]
        q_scale, q_maximum, q_total = (
            x[live].flatten() for x in (distributions.scale, distributions.maximum, distributions.total)
        )
        q_logits = distributions.logits[live].flatten(0, 1).float()
        q_power = power_of_two(relative_exponents(q_logits, q_maximum[:, None], q_scale[:, None]))
        q_power = torch.where(q_logits > -torch.inf, q_power, 0.0)
        sampled = (q_scale > 0)[:, None]
        q[rows_of_drafts.flatten()] = torch.where(sampled, q_power * inverse_total(q_total)[:, None], 0.0)
        is_sampled = torch.zeros_like(draft, dtype=torch.bool)
        is_sampled[rows_of_drafts.flatten()] = sampled[:, 0]
        # A draft from no distribution is none.
        no_distribution = torch.zeros_like(is_sampled)
        no_distribution[rows_of_drafts.flatten()] = sampled[:, 0] & (q_total <= 0)
        draft = torch.where(no_distribution, -1, draft)
    else:
        is_sampled = torch.zeros_like(draft, dtype=torch.bool)
    drafted, is_greedy = draft >= 0, scale == 0

    at_draft = draft.clamp_min(0)[:, None]
    p_draft = p.gather(1, at_draft)[:, 0].double()
    q_draft = torch.where(is_sampled, q.gather(1, at_draft)[:, 0].double(), 1.0)
    u = uniform(random_words(seed, position, Purpose.ACCEPT)[:, :2])
    accepts = drafted & torch.where(is_greedy, (best == draft) & (totals.total > 0), u * q_draft < p_draft)
    accepted = accepts.view(requests, rows)[:, :num_drafts].long().cumprod(1).sum(1)

    # Every row's token for the case that it is the last; one row of each request is.
    purpose = torch.where(torch.arange(rows) < num_drafts, Purpose.RECOVER, Purpose.BONUS).repeat(requests)
    words = random_words(seed, position, purpose.to(position.device))
    residual = is_sampled & drafted
    excluded = torch.where(drafted & ~is_sampled, draft, -1)[:, None]
    included = torch.arange(vocabulary, device=logits.device) != excluded
    by_row = torch.where(residual[:, None], (p - q).clamp_min(0), power * included)
    in_row = (residual | filtered)[:, None]
    tiles = torch.where(in_row, tile_sums((by_row * ONE).long()), totals.tiles_without(excluded[:, 0]))
    own = torch.where(in_row, (by_row * ONE_IN_TILE).long(), totals.own_weights(vocabulary) * included)
    token = pick_in_tiles(tiles, own, words)
    # A rejection that leaves nothing to recover is one of rounding.
    token = torch.where(is_greedy | (tiles.sum(1) == 0), best, token)
    token = torch.where(totals.total > 0, token, -1).view(requests, rows)

    column = torch.arange(rows, device=logits.device)
    emitted = torch.where(column < accepted[:, None], draft.view(requests, rows), -1)
    return accepted, torch.where(column == accepted[:, None], token, emitted)
