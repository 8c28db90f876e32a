"""What decoding requests carry from one step to the next, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.draft_sampling import DraftDistributions
from page4.kernels.sampling_params import SamplingParams

from .sampling import SamplingOptions


@dataclass(frozen=True)
class RequestStates:
    """The states of B requests, gathered.

    Attributes:
        tokens: int64 ``[B, K + 1]``, the last token and the drafts after it; -1: none.
        computed: int64 ``[B]``, position of the last token: so many tokens are in the target's caches.
        read_slots: int64 ``[B]``, recurrent slot with the state after them.
        history: int64 ``[B, n - 1]``, the last tokens before it.
    """

    tokens: Tensor
    computed: Tensor
    read_slots: Tensor
    history: Tensor


class DecodeState:
    """State of every request of the cache, by its row there, with one more row that padded requests share.

    All memory stays where it is, so a captured step finds it. Draft distributions lie by a request's place
    in the step (its lane) instead, as they are too large to be gathered.

    Args:
        rows: of the cache. num_drafts: K. history: n - 1. vocabulary: V.
    """

    def __init__(
        self, rows: int, num_drafts: int, history: int, vocabulary: int, device: torch.device
    ) -> None:
        self.device = device
        self.padding_row = rows
        self.vocabulary = vocabulary
        self.num_drafts = num_drafts
        self._widths = (num_drafts + 1, 1, 1, history)
        self.values = torch.zeros(rows + 1, sum(self._widths), dtype=torch.int64, device=device)
        self._integers = torch.zeros(rows + 1, 2, dtype=torch.int64, device=device)  # top_k, seed
        self._numbers = torch.zeros(rows + 1, 4, device=device)  # the scales, top_p, log2_min_p
        self._allowed: Tensor | None = None
        self._distributions: DraftDistributions | None = None

    @property
    def drafts(self) -> Tensor:
        """The drafts to be verified next, by row, ``[rows + 1, K]``; a view."""
        return self.values[:, 1 : self.num_drafts + 1]

    def begin(
        self, row: int, last_token: int, computed: int, history: tuple[int, ...], options: SamplingOptions
    ) -> None:
        """A request starts decoding after a prefill, without drafts; nothing waits for the device."""
        undrafted = [-1] * self.num_drafts
        self._put(self.values[row], torch.tensor([last_token, *undrafted, computed, 0, *history]))
        params = options.params()
        self._put(self._integers[row], torch.cat([params.top_k.long(), params.seed]))
        self._put(
            self._numbers[row],
            torch.cat([params.scale, params.draft_scale, params.top_p, params.log2_min_p]),
        )
        if options.allowed_tokens is not None or self._allowed is not None:
            self._put(self.allowed_words()[row], options.allowed_words(self.vocabulary))

    def of(self, index: Tensor) -> RequestStates:
        """States of rows ``[B]``."""
        return RequestStates(*self._split(self.values.index_select(0, index)))

    def put(self, index: Tensor, states: RequestStates) -> None:
        """Writes states of rows ``[B]`` back; of the padding row, any."""
        columns = (states.tokens, states.computed[:, None], states.read_slots[:, None], states.history)
        self.values.index_copy_(0, index, torch.cat(columns, dim=1))

    def params(self, index: Tensor, samples_drafts: bool) -> SamplingParams:
        """Sampling parameters of rows ``[B]``."""
        top_k, seed = self._integers.index_select(0, index).t().contiguous()
        scale, draft_scale, top_p, log2_min_p = self._numbers.index_select(0, index).t().contiguous()
        return SamplingParams(scale, draft_scale, top_k.int(), top_p, log2_min_p, seed, samples_drafts)

    def allowed_words(self) -> Tensor:
        """Masks of allowed tokens by row, int32 ``[rows + 1, ceil(V / 32)]``."""
        if self._allowed is None:
            shape = (len(self.values), -(-self.vocabulary // 32))
            self._allowed = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        return self._allowed

    def distributions(self, dtype: torch.dtype) -> DraftDistributions:
        """Distributions that the drafts of each lane were sampled from."""
        if self._distributions is None:
            like = torch.empty(self.padding_row, self.vocabulary, dtype=dtype, device="meta")
            made = DraftDistributions.empty(like, self.num_drafts)
            self._distributions = DraftDistributions(
                *(torch.zeros_like(x, device=self.device) for x in _parts(made))
            )
        return self._distributions

    def assign_lanes(self, moves: list[tuple[int, int]], begun: list[int]) -> None:
        """Takes the distributions of requests along to new lanes, and gives those that begin none.

        Steps in which nobody samples drafts write no distributions. So what an earlier request has left in a
        lane would pass for that of drafts that are none of its samples.

        Args:
            moves: pairs of old and new lane, moved all at once.
            begun: lanes of requests that were in no lane before.
        """
        if self._distributions is None:
            return
        if moves:
            old, new = (self._on_device(torch.tensor(lanes)) for lanes in zip(*moves, strict=True))
            for part in _parts(self._distributions):
                part.index_copy_(0, new, part.index_select(0, old))
        if begun:
            self._distributions.scale.index_fill_(0, self._on_device(torch.tensor(begun)), 0.0)

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, computed, read_slots, history = values.split(self._widths, dim=1)
        # Kernels want lists of one number a request contiguous.
        return tokens, computed.squeeze(1).contiguous(), read_slots.squeeze(1).contiguous(), history

    def _put(self, target: Tensor, values: Tensor) -> None:
        target.copy_(self._on_host(values), non_blocking=True)

    def _on_device(self, values: Tensor) -> Tensor:
        return self._on_host(values).to(self.device, non_blocking=True)

    def _on_host(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values


def _parts(distributions: DraftDistributions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return distributions.logits, distributions.scale, distributions.maximum, distributions.total


def lanes_of(store: DraftDistributions, lanes: int) -> DraftDistributions:
    """The first lanes of a store, as views."""
    return DraftDistributions(*(part[:lanes] for part in _parts(store)))
