"""Recurrent state of requests under speculation: K+1 slots each, so that rejection is an index, never a copy.

After a decode step over rows 0..K, slot t holds the state *after row t*. If a drafts were accepted, the next
step reads slot a. A prefill chunk leaves its final state in slot 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _Slots:
    """State ``[requests, slots, ...]`` and what every kind of it can do."""

    state: Tensor

    def read(self, requests: Tensor, slots: Tensor) -> Tensor:
        """States ``[B, ...]`` of requests ``[B]`` at their slots ``[B]`` (a copy)."""
        return self.state[requests, slots]

    def reset(self, request: int) -> None:
        """Zero state: the request has seen no token."""
        self.state[request] = 0

    def copy_of(self, request: int) -> Tensor:
        """All slots of a request, ``[slots, ...]``."""
        return self.state[request].clone()

    def put_back(self, request: int, state: Tensor) -> None:
        """Undoes everything since the copy was taken."""
        self.state[request] = state


class ConvSlots(_Slots):
    """Last inputs of a causal convolution.

    Attributes:
        state: ``[requests, slots, L, C]``, oldest input first, where L is ``(kernel - 1) * dilation``.
    """

    def __init__(
        self, requests: int, slots: int, length: int, channels: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.state = torch.zeros(requests, slots, length, channels, dtype=dtype, device=device)

    def advance(self, requests: Tensor, history: Tensor, rows: int, every_row: bool) -> None:
        """Stores the windows that end after each of ``rows`` rows, or after the last only.

        Args:
            history: ``[B, L + rows, C]``, the old state followed by the new inputs.
        """
        length = self.state.shape[2]
        for slot, row in enumerate(range(rows) if every_row else (rows - 1,)):
            window = history[:, row + 1 : row + 1 + length]
            self.state[requests, slot] = window.to(self.state.dtype)


class GatedDeltaSlots(_Slots):
    """State of a Gated DeltaNet layer: the delta-rule matrices in FP32 and the convolution's inputs.

    Attributes:
        state: ``[requests, slots, Hv, Dk, Dv]`` FP32.
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
        self.state = torch.zeros(requests, slots, heads, key_dim, value_dim, device=device)
        self.conv = conv

    def store_rows(self, requests: Tensor, states: Tensor) -> None:
        """Keeps the state after every row, ``[B, T, Hv, Dk, Dv]`` with T at most the number of slots."""
        self.state[requests, : states.shape[1]] = states

    def store_final(self, requests: Tensor, state: Tensor) -> None:
        """Keeps the state after a prefill chunk ``[B, Hv, Dk, Dv]`` in slot 0."""
        self.state[requests, 0] = state
