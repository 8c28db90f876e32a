"""How one request chooses its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kernels.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingOptions:
    """What a request asks for; the default is greedy.

    Attributes:
        temperature: 0 is greedy.
        top_k, top_p, min_p: filters of the target's distribution; 0, 1 and 0 are off.
        seed: of the request's random numbers. Together with a token's position it decides every draw, so
            that a request's tokens do not depend on the batch.
        sample_drafts: draft from the head's distribution at the same temperature, not its argmax. Either way
            tokens follow the target's distribution exactly.
        allowed_tokens: the only ids that may be emitted; all by default.

    Raises:
        InputError: a value out of range, or no token allowed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_drafts: bool = False
    allowed_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.params()
        if self.allowed_tokens is not None and (not self.allowed_tokens or min(self.allowed_tokens) < 0):
            raise InputError("allowed_tokens must name at least one token, and none below 0")

    @property
    def samples(self) -> bool:
        """Whether chance decides anything."""
        return self.temperature > 0

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts are drawn, so that verification needs their distributions."""
        return self.samples and self.sample_drafts

    def params(self) -> SamplingParams:
        """The same as tensors of one request."""
        return SamplingParams.of(
            [self.temperature],
            draft_temperature=[self.temperature if self.sample_drafts else 0.0],
            top_k=[self.top_k],
            top_p=[self.top_p],
            min_p=[self.min_p],
            seed=[self.seed],
        )

    def allowed_words(self, vocabulary: int) -> Tensor:
        """Bits of the allowed tokens in int32 words ``[ceil(V / 32)]``, the lowest first.

        Raises:
            InputError: an allowed id outside the vocabulary.
        """
        words = math.ceil(vocabulary / 32)
        if self.allowed_tokens is None:
            return torch.full((words,), -1, dtype=torch.int32)
        if max(self.allowed_tokens) >= vocabulary:
            raise InputError(f"allowed_tokens holds an id outside 0..{vocabulary - 1}")
        bits = torch.zeros(words * 32, dtype=torch.int64)
        bits[list(self.allowed_tokens)] = 1
        values = (bits.view(-1, 32) << torch.arange(32)).sum(1)  # [W], no bit is a sign yet
        return torch.where(values >= 2**31, values - 2**32, values).int()


GREEDY = SamplingOptions()
