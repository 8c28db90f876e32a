"""Decode steps as a server runs them, timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from page4.spec_decode import SpeculativeDecoder
from page4.spec_decode.request import Request

_SETTLING = 2  # steps until launches and outcomes keep their distance


@dataclass(frozen=True)
class TimedSteps:
    """Attributes: ``seconds`` between outcomes of consecutive steps; ``tokens`` that these steps emitted."""

    seconds: list[float]
    tokens: int


def time_steps(decoder: SpeculativeDecoder, requests: Sequence[Request], steps: int) -> TimedSteps:
    """Decodes ``steps`` steps of requests in their decode phase, and a few before them that are not counted.

    On a GPU each step is launched before the outcome of the one before is read, so that the device does not
    wait for the host; every shape that the steps can meet is captured before the first of them.
    """
    decoder.prepare(requests, growth=most_tokens(steps, decoder.config.num_draft_tokens))
    overlap = decoder.model.device.type == "cuda"
    in_flight = decoder.launch(requests) if overlap else None
    since, seconds, tokens = decoder.now(), [], 0
    for turn in range(-_SETTLING, steps):
        launched = decoder.launch(requests)
        done, in_flight = (in_flight, launched) if overlap else (launched, None)
        assert done is not None
        emitted = sum(map(len, decoder.collect(done).values()))
        now = time.perf_counter()
        if turn >= 0:
            seconds.append(now - since)
            tokens += emitted
        since = now
    if in_flight is not None:
        decoder.collect(in_flight)
    return TimedSteps(seconds, tokens)


def most_tokens(steps: int, num_draft_tokens: int) -> int:
    """Tokens that one call of :func:`time_steps` may emit for a request."""
    return (steps + _SETTLING + 1) * (num_draft_tokens + 1)
