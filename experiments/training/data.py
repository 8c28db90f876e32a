"""Draws training windows: without replacement within a source, sources by weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from page4.experiments.corpus.pack import PackedData, SourceSpan
from page4.kernels.errors import InputError


class WindowSampler:
    """Windows of consecutive tokens of one source.

    A source's windows tile it from a random offset and are drawn in random order; when all are used, a new
    offset starts the next epoch. A source that was read ``max_epochs`` times is drawn no more.
    """

    def __init__(self, data: PackedData, seed: int, max_epochs: float = 4.0) -> None:
        self.tokens = torch.from_numpy(data.train.astype(np.int16))  # ids are below 2^15
        self.spans = data.spans
        self.generator = np.random.default_rng(seed)
        self.max_epochs = max_epochs
        self.drawn = {span.name: 0 for span in data.spans}
        self._queues: dict[str, list[int]] = {}
        self._width = 0

    def to(self, device: torch.device) -> WindowSampler:
        """Keeps the token stream on the training device."""
        self.tokens = self.tokens.to(device)
        return self

    def draw(self, count: int, context: int, ahead: int, weights: dict[str, float]) -> Tensor:
        """``[count, context + ahead]`` int64.

        Args:
            ahead: tokens after the window that serve as targets.
            weights: per genre, relative to the tokens it has.
        Raises:
            InputError: no source is long enough, or all were read ``max_epochs`` times.
        """
        width = context + ahead
        if width != self._width:
            self._queues, self._width = {}, width
        sizes = np.array([self._share(span, width, weights) for span in self.spans])
        if sizes.sum() <= 0:
            raise InputError(
                f"no text left for windows of {context} tokens: every source is shorter or was read "
                f"{self.max_epochs:g} times"
            )
        picks = self.generator.choice(len(self.spans), size=count, p=sizes / sizes.sum())
        starts = [self._next_start(self.spans[i], context, ahead) for i in picks]
        for i in picks:
            self.drawn[self.spans[i].name] += context
        device = self.tokens.device
        index = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
        return self.tokens[index].long()

    def _share(self, span: SourceSpan, width: int, weights: dict[str, float]) -> float:
        size = span.end - span.start
        if size < width or self.drawn[span.name] >= self.max_epochs * size:
            return 0.0
        return size * weights.get(span.genre, 1.0)

    def _next_start(self, span: SourceSpan, context: int, ahead: int) -> int:
        queue = self._queues.get(span.name)
        if not queue:
            slack = span.end - span.start - context - ahead
            offset = int(self.generator.integers(0, min(context, slack) + 1))
            starts = np.arange(span.start + offset, span.end - context - ahead + 1, context)
            queue = self._queues[span.name] = self.generator.permutation(starts).tolist()
        return queue.pop()

    def epochs(self) -> dict[str, float]:
        """How often each source was read."""
        return {span.name: round(self.drawn[span.name] / (span.end - span.start), 2) for span in self.spans}

    def state_dict(self) -> dict[str, Any]:
        """Everything the next draw depends on."""
        return {
            "generator": self.generator.bit_generator.state,
            "drawn": dict(self.drawn),
            "queues": {name: list(queue) for name, queue in self._queues.items()},
            "width": self._width,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was taken."""
        self.generator.bit_generator.state = state["generator"]
        self.drawn = dict(state["drawn"])
        self._queues = {name: list(queue) for name, queue in state["queues"].items()}
        self._width = state["width"]
