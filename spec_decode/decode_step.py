"""The decode step: verify, accept, draft, and the inputs of the next step, without a word from the host.

It reads and writes device memory only, in launches that depend on its shape alone, so it can be captured as a
graph once and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kvcache import HybridCache
from page4.model import Qwen4ExpForCausalLM, RowBatch

from .choosing import Chooser
from .decode_state import DecodeState, RequestStates, lanes_of


@dataclass(frozen=True)
class StepShape:
    """Everything about a step that its launches depend on.

    Attributes:
        lanes: B, places for requests.
        longest: a bound of the tokens of the longest request at the end of the step.
        rows: T, verified rows of a request: the last token, and T - 1 drafts.
        drafts: tokens to draft for the next step, 0 to K.
        samples: whether any request samples or may emit some tokens only.
        samples_drafts: whether any request's drafts are sampled.
        masked: whether any request may emit some tokens only.
    """

    lanes: int
    longest: int
    rows: int
    drafts: int
    samples: bool = False
    samples_drafts: bool = False
    masked: bool = False


@dataclass(frozen=True)
class DecodeStep:
    """A model, its cache and the state of its requests, and the step that advances them.

    A request's rows are ``[last token, d1 .. dK]`` (a draft of -1: none). The longest prefix of drafts that
    verification confirms is accepted and emitted with one token of the target's own. The draft layer then
    reads the target's streams over the same rows, each with the token after it; those past the accepted
    ones are wrong but harmless, as whatever they write is written again before it is read. From the last
    accepted row it drafts a token, and the next ones from its own streams; the rows those write are written
    again, from true streams, by the next step.
    """

    model: Qwen4ExpForCausalLM
    cache: HybridCache
    state: DecodeState
    chooser: Chooser

    @torch.inference_mode()
    def run(self, lanes: Tensor, shape: StepShape) -> Tensor:
        """One step.

        Args:
            lanes: int64 ``[B]``, the cache's row of each request; -1: padding, which is skipped.
        Returns:
            int64 ``[B, T + 1]``: the number of accepted drafts, then the emitted tokens, -1 after them. -1 in
            place of a token: the target has no distribution there. Padded lanes mean nothing.
        """
        padded = lanes < 0
        index = lanes.masked_fill(padded, self.state.padding_row)
        before = self.state.of(index)
        computed, read_slots = before.computed, before.read_slots
        params = None
        if shape.samples or self.chooser.backend == "triton":
            params = self.state.params(index, shape.samples_drafts)
        store = None
        if shape.samples_drafts:
            store = lanes_of(self.state.distributions(self.model.dtype), shape.lanes)

        # Where nothing was drafted, any token serves: verification ends the prefix before it.
        context = torch.cat([before.history, before.tokens[:, : shape.rows]], dim=1).clamp_min(0)
        batch = RowBatch.of_decode_rows(lanes, computed, context, read_slots, shape.rows, shape.longest)
        streams = self.model.forward_rows(batch, self.cache)
        logits = self.model.logits(streams).unflatten(0, (shape.lanes, shape.rows))
        accepted, emitted = self.chooser.verify(
            logits,
            before.tokens[:, 1 : shape.rows],
            (computed + 1).masked_fill(padded, -1),
            params,
            None if store is None else store.first(shape.rows - 1),
            self._allowed(index, shape) if shape.masked else None,
        )

        count = accepted.clamp_min(0)  # -1 where padded
        last = emitted.gather(1, count[:, None])  # [B, 1]
        now = computed + count + 1
        width = before.history.shape[1]
        kept = count[:, None] + 1 + torch.arange(width, device=lanes.device)
        drafts = torch.full_like(before.tokens[:, 1:], -1)
        if shape.drafts:
            batch = RowBatch.of_decode_rows(
                lanes, computed, emitted.clamp_min(0), read_slots, shape.rows, shape.longest
            )
            streams = self.model.draft_rows(batch, streams, self.cache).unflatten(0, logits.shape[:2])
            streams = streams.gather(1, count[:, None, None].expand(-1, 1, streams.shape[2])).squeeze(1)
        for step in range(shape.drafts):
            if step:
                token = drafts[:, step - 1 : step].clamp_min(0)
                batch = RowBatch.of_decode_rows(lanes, now + step - 1, token, read_slots, 1, shape.longest)
                streams = self.model.draft_rows(batch, streams, self.cache)
            position = (now + 1 + step).masked_fill(padded, -1)
            drafts[:, step] = self.chooser.draft(
                self.model.draft_logits(streams), position, params, store, step
            )
        tokens = torch.cat([last, drafts], dim=1)
        self.state.put(index, RequestStates(tokens, now, count, context.gather(1, kept)))
        return torch.cat([accepted[:, None], emitted], dim=1)

    def _allowed(self, index: Tensor, shape: StepShape) -> Tensor:
        words = self.state.allowed_words().index_select(0, index)
        return words[:, None].expand(-1, shape.rows, -1)
