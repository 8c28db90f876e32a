"""The primary metric: one speculative round from each of many prefixes of real text.

Free-running generation drifts from the text and loops, which inflates acceptance. Here every round starts
from text somebody wrote: prefill to the prefix, draft, verify, count, and then go on with the text itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError

from .engine import SpeculativeDecoder, copy_of
from .request import Phase, Request


@dataclass(frozen=True)
class RoundResult:
    """Outcome of R rounds on each of B texts.

    Attributes:
        prefix_lengths: the R prefixes, tokens.
        accepted: ``[B, R]`` int64, drafts accepted, 0..K.
        prefill_tokens, prefill_seconds: target and draft prefill of all texts up to the first prefix.
        round_seconds: wall time of each round (draft and verification) of the whole batch.
    """

    prefix_lengths: list[int]
    accepted: Tensor
    prefill_tokens: int
    prefill_seconds: float
    round_seconds: list[float]


def measure_rounds(
    decoder: SpeculativeDecoder, texts: Sequence[Sequence[int]], prefix_lengths: Sequence[int]
) -> RoundResult:
    """One greedy speculative round from ``text[:P]`` for every text and every P.

    Args:
        texts: token ids, each at least as long as the last prefix; at most ``max_requests`` of them.
        prefix_lengths: ascending.
    Raises:
        InputError: prefixes not ascending, a text too short, no drafts to verify, no texts, or too many.
    """
    prefixes = list(prefix_lengths)
    if not prefixes or prefixes[0] < 1 or any(b <= a for a, b in itertools.pairwise(prefixes)):
        raise InputError(f"prefix lengths {prefixes} are not ascending from at least 1")
    for i, text in enumerate(texts):
        if len(text) < prefixes[-1]:
            raise InputError(f"text {i} has {len(text)} tokens, the longest prefix needs {prefixes[-1]}")
    if len(texts) > decoder.config.max_requests:
        raise InputError(f"{len(texts)} texts at once, max_requests is {decoder.config.max_requests}")
    if decoder.config.num_draft_tokens < 1:
        raise InputError("num_draft_tokens is 0: a round needs at least one draft")
    if not texts:
        raise InputError("no texts given: a round needs at least one")
    requests: list[Request] = []
    try:
        for text in texts:
            requests.append(decoder.open(text[: prefixes[-1]]))
        start = decoder.now()
        logits = _read(decoder, requests, prefixes[0])
        prefill_seconds = decoder.now() - start
        accepted, seconds = [], []
        for i, prefix in enumerate(prefixes):
            if i:
                logits = _read(decoder, requests, prefix)
            start = decoder.now()
            accepted.append(_round(decoder, requests, logits))
            seconds.append(decoder.now() - start)
    finally:
        for request in requests:
            decoder.close(request)
    return RoundResult(
        prefixes, torch.tensor(accepted).T.contiguous(), len(texts) * prefixes[0], prefill_seconds, seconds
    )


def _read(decoder: SpeculativeDecoder, requests: Sequence[Request], length: int) -> dict[int, Tensor]:
    """Prefills real text up to ``length``; the draft layer stays a row behind, its next token open."""
    logits: dict[int, Tensor] = {}
    texts = [request.tokens for request in requests]
    while requests[0].computed < length:
        stop = min(requests[0].computed + decoder.config.prefill_chunk, length)
        logits = decoder.advance(requests, {}, {r.row: stop for r in requests})
        for request, text in zip(requests, texts, strict=True):
            request.tokens = text[:stop]
        decoder.draft(requests, 0)
        for request, text in zip(requests, texts, strict=True):
            request.tokens = text
    return logits


def _round(decoder: SpeculativeDecoder, requests: Sequence[Request], logits: dict[int, Tensor]) -> list[int]:
    """Accepted drafts of a round per request; leaves all as it was, but for rows that are rewritten."""
    before = [copy_of(request) for request in requests]
    states = [decoder.cache.snapshot(request.row) for request in requests]
    next_tokens = torch.stack([logits[request.row][-1] for request in requests]).argmax(-1).tolist()
    for request, next_token in zip(requests, next_tokens, strict=True):
        request.tokens = [*request.tokens[: request.computed], next_token]
        request.phase = Phase.DECODE
    drafts = decoder.draft(requests, decoder.config.num_draft_tokens)
    verified = decoder.advance(requests, drafts, {})
    counts = []
    for request in requests:
        decoder.accept(request, drafts[request.row], verified[request.row].argmax(-1))
        counts.append(request.accepted[-1])
    for request, old, state in zip(requests, before, states, strict=True):
        decoder.rewind(request, old)
        decoder.cache.restore(request.row, state)
    return counts
