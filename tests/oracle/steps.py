"""One request, fed to a model in steps of any size and phase."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from page4.kvcache import CacheConfig, HybridCache
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment


class Stepper:
    """Keeps what a request knows between steps: its tokens so far and where its recurrent state stands."""

    def __init__(self, model: Qwen4ExpForCausalLM, cache: HybridCache | None = None) -> None:
        self.model = model
        self.cache = cache if cache is not None else exact_cache(model)
        self.request = self.cache.open()
        self.tokens: list[int] = []
        self.read_slot = 0

    def prefill(self, tokens: Sequence[int]) -> Tensor:
        """Streams ``[T, S*H]`` of a prefill chunk."""
        streams = self._run(self.segment(tokens, decode=False))
        self.tokens += tokens
        self.read_slot = 0
        return streams

    def decode(self, tokens: Sequence[int], keep: int | None = None) -> Tensor:
        """Streams ``[T, S*H]`` of verify rows, of which the first ``keep`` (default all) stay."""
        kept = len(tokens) if keep is None else keep
        assert kept >= 1, "the first row holds an accepted token"
        streams = self._run(self.segment(tokens, decode=True))
        self.tokens += tokens[:kept]
        self.read_slot = kept - 1
        return streams

    def segment(self, tokens: Sequence[int], decode: bool) -> Segment:
        """The next rows of this request, with room reserved for them."""
        position = len(self.tokens)
        self.cache.reserve(self.request, position + len(tokens))
        preceding = self.model.preceding(self.tokens, position)
        return Segment(self.request, position, torch.tensor(tokens), preceding, decode, self.read_slot)

    def _run(self, segment: Segment) -> Tensor:
        return self.model.forward_rows(RowBatch.pack([segment], self.model.device), self.cache)


def exact_cache(
    model: Qwen4ExpForCausalLM, num_draft_tokens: int = 7, max_requests: int = 1, max_tokens: int = 1024
) -> HybridCache:
    """A cache that stores everything in FP32."""
    return model.new_cache(
        CacheConfig.unquantised(
            torch.float32,
            max_requests=max_requests,
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
        )
    )
