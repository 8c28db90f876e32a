"""Gated hyper-connections: how a block reads from and writes to the residual streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from page4.kernels.backend import Backend
from page4.kernels.norm_rope import rms_norm_zero_centred

from .config import Qwen4ExpConfig
from .weights import Weight, projection


class HyperConnection(nn.Module):
    """Reads a block's input from S residual streams and writes its output back.

    With xn the per-stream zero-centred norm of R::

        gate   = sigmoid(W_up . silu(W_down . xn / S))
        mixed  = mean over streams of gate * xn
        inject = 2 sigmoid(W_inject . xn / S)
        R'[c]  = R[c] + inject[c] * y

    Source: Qwen4Exp reference implementation (transformers). The final mixer has no ``block_inject_weight``.
    """

    def __init__(self, config: Qwen4ExpConfig, inject: bool = True) -> None:
        super().__init__()
        self.backend: Backend = "reference"
        self.streams = config.hc_count
        self.hidden_size = config.hidden_size
        self.eps = config.rms_norm_eps
        width = config.stream_size
        self.hc_norm = Weight(width)
        self.input_mix_weight_down = projection(config.hc_lowrank, width)
        self.input_mix_weight_up = projection(width, config.hc_lowrank)
        self.block_inject_weight = projection(self.streams, width) if inject else None

    def normalise(self, residual: Tensor) -> Tensor:
        """Per-stream norm of the residual stack, ``[N, S*H] -> [N, S*H]``."""
        return rms_norm_zero_centred(residual, self.hc_norm.weight, self.eps, group_size=self.hidden_size)

    def mix(self, normed: Tensor) -> Tensor:
        """Block input from the normalised streams, ``[N, S*H] -> [N, H]``."""
        low = F.silu(self.input_mix_weight_down(normed) / self.streams)
        gate = torch.sigmoid(self.input_mix_weight_up(low))
        return (gate * normed).unflatten(-1, (self.streams, self.hidden_size)).mean(-2)

    def read(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Block input ``[N, H]`` and injection weights ``[N, S]`` of the residual stack ``[N, S*H]``."""
        assert self.block_inject_weight is not None, "the final mixer has nothing to inject"
        if self.backend == "triton":
            mixed, inject = self._read_triton(residual)
            assert inject is not None
            return mixed, inject
        normed = self.normalise(residual)
        inject = 2 * torch.sigmoid(self.block_inject_weight(normed) / self.streams)
        return self.mix(normed), inject

    def write(self, residual: Tensor, output: Tensor, inject: Tensor) -> Tensor:
        """Adds a block's output ``[N, H]`` to every stream with its weight, ``-> [N, S*H]``."""
        if self.backend == "triton":
            from page4.kernels.hyper_connection_triton import write_streams_triton  # see Step.kernels

            return write_streams_triton(residual, output, inject)
        update = inject.unsqueeze(-1) * output.unsqueeze(-2)  # [N, S, H]
        return (residual + update.flatten(-2)).to(residual.dtype)

    def forward(self, residual: Tensor) -> Tensor:
        """The final mixer: ``[N, S*H] -> [N, H]``."""
        if self.backend == "triton":
            return self._read_triton(residual)[0]
        return self.mix(self.normalise(residual))

    def _read_triton(self, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """Block input and, but for the final mixer, injection weights, in six launches at most."""
        from page4.kernels.hyper_connection_triton import (  # see Step.kernels
            activate_triton,
            group_norm_triton,
            mix_streams_triton,
        )

        normed = group_norm_triton(residual, self.hc_norm.weight, self.streams, self.eps)
        low = self.input_mix_weight_down(normed)
        inject = None if self.block_inject_weight is None else self.block_inject_weight(normed)
        activate_triton(low, inject, self.streams)
        return mix_streams_triton(self.input_mix_weight_up(low), normed, self.streams), inject
