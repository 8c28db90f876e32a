"""Recurrent state of requests under speculation: rejecting drafts is an index, never a copy.

The delta rule's state has K+1 slots a request. After a decode step over rows 0..K, slot t holds the state
*after row t*. If a drafts were accepted, the next step reads slot a. A prefill chunk leaves its final state
in slot 0.

A convolution's state is its last inputs, in a ring by position: the rows of a step are written where no row
of the same step reads, and rejected ones are written again before anything reads them.

Both have one request more than asked for: -1, which stands for padding, indexes it, and nothing reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _Slots:
    """State ``[requests + 1, slots, ...]`` and what every kind of it can do."""

    state: Tensor

    def reset(self, request: int) -> None:
        """Zero state: the request has seen no token."""
        self.state[request] = 0

    def copy_of(self, requests: Tensor) -> Tensor:
        """All slots of requests ``[B]``, ``[B, slots, ...]``."""
        return self.state[requests]

    def put_back(self, requests: Tensor, states: Tensor) -> None:
        """Undoes everything since the copy was taken."""
        self.state[requests] = states

    def after_prefill(self, request: int) -> Tensor:
        """What a prefill leaves behind of a request, as a view."""
        return self.state[request]


class ConvSlots(_Slots):
    """Last inputs of a causal convolution that reads L rows back, for speculation over ``rows`` rows.

    Attributes:
        state: ``[requests + 1, L + rows, C]``; the input at position p lies in slot ``p % (L + rows)``.
        length: L, which is ``(kernel - 1) * dilation``.
    """

    def __init__(
        self, requests: int, rows: int, length: int, channels: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = length
        self.state = torch.zeros(requests + 1, length + rows, channels, dtype=dtype, device=device)

    def window(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Inputs ``[B, L, C]`` before each request's position ``[B]``, oldest first; 0 before the text."""
        back = torch.arange(-self.length, 0, device=positions.device)
        before = positions[:, None] + back  # [B, L]
        inputs = self.state[requests[:, None], before % self.state.shape[1]]
        return inputs.masked_fill(before[..., None] < 0, 0)

    def store(self, requests: Tensor, positions: Tensor, inputs: Tensor) -> None:
        """Keeps the inputs ``[B, T, C]`` that begin at positions ``[B]``: the last, as many as have slots."""
        rows, slots = inputs.shape[1], self.state.shape[1]
        kept = torch.arange(max(0, rows - slots), rows, device=positions.device)
        places = (positions[:, None] + kept) % slots
        self.state[requests[:, None], places] = inputs[:, -slots:].to(self.state.dtype)


class GatedDeltaSlots(_Slots):
    """State of a Gated DeltaNet layer: the delta-rule matrices in FP32 and the convolution's inputs.

    Attributes:
        state: ``[requests + 1, slots, Hv, Dk, Dv]`` FP32.
    """

    def __init__(
        self,
        requests: int,
        slots: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        conv: ConvSlots,
        device: torch.device,
    ) -> None:
        self.state = torch.zeros(requests + 1, slots, heads, key_dim, value_dim, device=device)
        self.conv = conv

    def after_prefill(self, request: int) -> Tensor:
        """Slot 0 of a request, ``[Hv, Dk, Dv]``, as a view."""
        return self.state[request, 0]

    def read(self, requests: Tensor, slots: Tensor) -> Tensor:
        """States ``[B, Hv, Dk, Dv]`` of requests ``[B]`` at their slots ``[B]`` (a copy)."""
        return self.state[requests, slots]

    def store_rows(self, requests: Tensor, states: Tensor) -> None:
        """Keeps the state after every row, ``[B, T, Hv, Dk, Dv]`` with T at most the number of slots."""
        self.state[requests, : states.shape[1]] = states

    def store_final(self, requests: Tensor, state: Tensor) -> None:
        """Keeps the state after a prefill chunk ``[B, Hv, Dk, Dv]`` in slot 0."""
        self.state[requests, 0] = state
