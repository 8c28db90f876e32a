"""A request on its way through prefill and decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor


class Phase(Enum):
    """What a request does in the next step. Set by the generation loop, never inferred from a row count."""

    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass
class Request:
    """Tokens of one sequence and how far the caches have got with them.

    Attributes:
        row: the request's row in the cache.
        tokens: prompt and everything emitted so far.
        prompt_length: tokens that belong to the prompt.
        phase: see :class:`Phase`.
        computed: tokens whose K/V and states are in the target's caches.
        read_slot: recurrent slot that holds the state after ``computed`` tokens.
        undrafted: target streams ``[m, S*H]`` of the last m computed rows, which the draft layer has not
            seen; a row can be drafted once the token after it is known.
        accepted: drafts accepted in each verification.
    """

    row: int
    tokens: list[int]
    prompt_length: int
    phase: Phase = Phase.PREFILL
    computed: int = 0
    read_slot: int = 0
    undrafted: Tensor | None = None
    accepted: list[int] = field(default_factory=list)

    @property
    def emitted(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]
