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

from .engine import SpeculativeDecoder
from .request import Phase, Request
from .sampling import GREEDY, SamplingOptions


@dataclass(frozen=True)
class RoundResult:
    """Outcome of R rounds on each of B texts.

    Attributes:
        prefix_lengths: the R prefixes, tokens.
        accepted: ``[B, R]`` int64, drafts accepted, 0..K.
        prefill_tokens, prefill_seconds: target and draft prefill of all texts up to the first prefix, but for
            its last token, which the first round takes.
        round_seconds: wall time of each round (draft and verification) of the whole batch.
    """

    prefix_lengths: list[int]
    accepted: Tensor
    prefill_tokens: int
    prefill_seconds: float
    round_seconds: list[float]


def measure_rounds(
    decoder: SpeculativeDecoder,
    texts: Sequence[Sequence[int]],
    prefix_lengths: Sequence[int],
    sampling: Sequence[SamplingOptions] | None = None,
) -> RoundResult:
    """One speculative round from ``text[:P]`` for every text and every P.

    Args:
        texts: token ids, each at least as long as the last prefix; at most ``max_requests`` of them.
        prefix_lengths: ascending.
        sampling: of each text; greedy by default. A text draws the same random numbers in every decoder, so
            that formats are compared on the same luck.
    Raises:
        InputError: prefixes not ascending, a text too short, no drafts to verify, no texts, or too many; or
            the decoder reuses prefixes, so that some texts would not be computed.
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
    if decoder.prefix is not None:
        raise InputError("rounds are measured on texts that are computed: leave prefix out of the decoder")
    if not texts:
        raise InputError("no texts given: a round needs at least one")
    each = [GREEDY] * len(texts) if sampling is None else list(sampling)
    if len(each) != len(texts):
        raise InputError(f"{len(each)} sampling options do not match {len(texts)} texts")
    requests: list[Request] = []
    try:
        for text, options in zip(texts, each, strict=True):
            requests.append(decoder.open(text[: prefixes[-1]], options))
        start = decoder.now()
        _read(decoder, requests, prefixes[0] - 1)
        prefill_seconds = decoder.now() - start
        accepted, seconds = [], []
        for prefix in prefixes:
            _read(decoder, requests, prefix - 1)
            counts, elapsed = _round(decoder, requests)
            accepted.append(counts)
            seconds.append(elapsed)
    finally:
        for request in requests:
            decoder.close(request)
    prefilled = len(texts) * (prefixes[0] - 1)
    return RoundResult(prefixes, torch.tensor(accepted).T.contiguous(), prefilled, prefill_seconds, seconds)


def _read(decoder: SpeculativeDecoder, requests: Sequence[Request], length: int) -> None:
    """Prefills real text up to ``length`` tokens."""
    while requests[0].computed < length:
        stop = min(requests[0].computed + decoder.config.prefill_chunk, length)
        decoder.prefill(dict.fromkeys(requests, stop))


def _round(decoder: SpeculativeDecoder, requests: Sequence[Request]) -> tuple[list[int], float]:
    """Accepted drafts of a round per request, and its seconds; leaves all as it was.

    Two decode steps: one takes the prefix's last token and drafts, the next one verifies.
    """
    texts, computed = [request.tokens for request in requests], requests[0].computed
    rows = [request.row for request in requests]
    states = decoder.cache.snapshot(rows)
    for request in requests:
        request.tokens = request.tokens[: computed + 1]
        decoder.start(request)
    drafts = decoder.config.num_draft_tokens
    for count, drafted in ((1, drafts), (drafts + 1, 0)):
        decoder.prepare(requests, count, drafted)
    start = decoder.now()
    decoder.collect(decoder.launch(requests, rows=1))
    decoder.collect(decoder.launch(requests, drafts=0))
    seconds = decoder.now() - start
    counts = [request.accepted.pop() for request in requests]
    for request, text in zip(requests, texts, strict=True):
        request.tokens, request.computed, request.phase = text, computed, Phase.PREFILL
    decoder.cache.restore(rows, states)
    return counts, seconds
