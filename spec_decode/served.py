"""What a client asks for and gets, and what serving all of them took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .sampling import GREEDY, SamplingOptions

OnTokens = Callable[["Served", list[int]], None]


@dataclass(eq=False)
class Served:
    """A request as its client sees it.

    Attributes:
        prompt: its token ids.
        max_new_tokens: tokens to emit at most.
        stop_token_ids: ids that end it; the one that does is emitted.
        sampling: how tokens are chosen.
        on_tokens: called with new tokens, at least one, as soon as they are known.
        tokens: emitted so far.
        accepted: drafts accepted in each verification.
        finished: whether no more tokens follow.
        preemptions: how often it lost its pages and was computed again.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingOptions = GREEDY
    on_tokens: OnTokens | None = None
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finished: bool = False
    preemptions: int = 0

    @property
    def length(self) -> int:
        """Tokens of the prompt and at most of the output."""
        return len(self.prompt) + self.max_new_tokens


@dataclass
class ServingStats:
    """Where the time went.

    Attributes:
        prefill_tokens, prefill_seconds: of all steps in which some request was prefilling.
        step_seconds: wall time of each pure decode step (verification and drafting), without what it took to
            capture a new shape.
        decode_tokens: tokens emitted by those steps, over all requests.
        preemptions: requests that lost their pages and were computed again.
        replayed_tokens: tokens that were emitted before, and decoded again for their K/V and states.
        diverged: requests of which the second time gave another token than the first.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    decode_tokens: int = 0
    preemptions: int = 0
    replayed_tokens: int = 0
    diverged: int = 0
