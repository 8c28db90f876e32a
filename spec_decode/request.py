"""A request on its way through prefill and decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from page4.kvcache.prefix_cache import Restoration
from page4.kvcache.prefix_chain import PrefixChain

from .sampling import GREEDY, SamplingOptions


class Phase(Enum):
    """What a request does in the next step. Set by who runs the steps, never inferred from a row count."""

    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """Tokens of one sequence and how far the caches have got with them, as the host knows it.

    Attributes:
        row: the request's row in the cache.
        tokens: prompt and everything emitted so far.
        prompt_length: tokens that belong to the prompt.
        sampling: how tokens are chosen.
        phase: see :class:`Phase`.
        computed: tokens whose K/V and states are in the target's caches.
        in_flight: decode steps that run and whose outcome is not known yet.
        drafted: whether the next step to be known verifies drafts; the first one of a request has none.
        accepted: drafts accepted in each verification.
        prefix: keys of the prompt's prefixes, if they are kept.
        restoration: a prefix on its way back from the host.
    """

    row: int
    tokens: list[int]
    prompt_length: int
    sampling: SamplingOptions = GREEDY
    phase: Phase = Phase.PREFILL
    computed: int = 0
    in_flight: int = 0
    drafted: bool = False
    accepted: list[int] = field(default_factory=list)
    prefix: PrefixChain | None = None
    restoration: Restoration | None = None

    @property
    def emitted(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]
