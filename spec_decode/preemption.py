"""Preemption by recomputation: whoever came last gives its pages back, and begins again when there is room.

Beginning again means: prefill the prompt, in the same chunks or from its kept prefix, and *decode* once more
what was emitted already. Prefilling those tokens would be faster, but would compute them in other shapes,
with other roundings, and would move the rounds of drafts, from which sampled tokens take their random
numbers. The second decoding draws the same numbers and emits the same tokens; they are compared with those
that the client has, and not handed out again.

Products round differently in batches of other sizes, so a second time can choose another token where two are
equally good within rounding. What a client has stays: from there on the request begins once more with its
tokens as part of the prompt, and is counted as diverged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from page4.kernels.errors import InputError
from page4.kvcache.pages import pages_for
from page4.kvcache.prefix_chain import PrefixChain

from .engine import SpeculativeDecoder
from .request import Request
from .served import Served, ServingStats


@dataclass
class _Life:
    """What is known of a request beyond its stay in the cache.

    Attributes:
        arrival: number in the order of first admissions.
        settled: of the emitted tokens, those that are part of the prompt now.
        accepted: drafts accepted in the verifications that emitted them.
    """

    arrival: int
    settled: int = 0
    accepted: list[int] = field(default_factory=list)


class Preemption:
    """Who is admitted, who has to leave, and what a request that came back must not emit again.

    The request that came first is never preempted, and any request has room alone: so all of them end.
    """

    def __init__(self, decoder: SpeculativeDecoder, stats: ServingStats) -> None:
        self._decoder, self._stats = decoder, stats
        self._lives: WeakKeyDictionary[Served, _Life] = WeakKeyDictionary()
        self._chains: WeakKeyDictionary[Served, PrefixChain] = WeakKeyDictionary()
        self._arrivals = 0

    def has_room(self, served: Served) -> bool:
        """Whether there are pages for a request up to where it is, and for its next steps.

        Pages of its prefix that others hold are there already.
        """
        needed = pages_for(self._tokens_now(served))
        pool, prefix = self._decoder.cache.tables.pool, self._decoder.prefix
        if needed > pool.available and prefix is not None:
            if served not in self._chains:
                self._chains[served] = prefix.chain(self._prompt(served))
            needed -= prefix.shared_pages(self._chains[served])
        return needed <= pool.available

    def open(self, served: Served) -> Request:
        """Begins a request, or begins it again, with all pages that :meth:`has_room` has found.

        Raises:
            InputError: there are fewer: a file of its prefix was damaged.
        """
        request = self._decoder.open(self._prompt(served), served.sampling)
        try:
            self._decoder.cache.reserve(request.row, self._tokens_now(served))
        except InputError:
            self._decoder.close(request)
            raise
        if served not in self._lives:
            self._lives[served] = _Life(self._arrivals)
            self._arrivals += 1
        return request

    def victim(self, decoding: Sequence[Request], running: Mapping[Request, Served]) -> Request | None:
        """Who has to leave so that the others can make their next step; None: all of them can."""
        if self._decoder.missing_pages(decoding) <= self._decoder.cache.tables.pool.available:
            return None
        return max(running, key=lambda request: self._lives[running[request]].arrival)

    def unknown(self, request: Request, served: Served, tokens: list[int]) -> list[int] | None:
        """Of tokens that a step has emitted, those that the client does not have.

        None: it has others. Then its tokens count as part of the prompt when the request begins again.
        """
        life = self._lives[served]
        start = life.settled + len(request.tokens) - request.prompt_length - len(tokens)
        known = served.tokens[start : start + len(tokens)]
        if known != tokens[: len(known)]:
            life.settled, life.accepted = len(served.tokens), list(served.accepted)
            self._chains.pop(served, None)
            self._stats.diverged += 1
            return None
        self._stats.replayed_tokens += len(known)
        return tokens[len(known) :]

    def accepted(self, request: Request, served: Served) -> list[int]:
        """Drafts accepted in each verification of a request, in all its lives."""
        return self._lives[served].accepted + request.accepted

    def _prompt(self, served: Served) -> list[int]:
        settled = self._lives[served].settled if served in self._lives else 0
        return [*served.prompt, *served.tokens[:settled]]

    def _tokens_now(self, served: Served) -> int:
        return len(served.prompt) + len(served.tokens) + self._decoder.config.overrun
