"""The model's own continuations of real prefixes, decoded in large batches, for the head to learn from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.experiments.training import rows as row
from page4.experiments.training.sequence import LayerState, SequenceModel, layers
from page4.kernels.gated_delta import causal_conv1d_reference, recurrent_gated_delta_reference
from page4.model.decoder import DecoderLayer


class RolloutDecoder:
    """Decodes ``B`` sequences at once; they stay shorter than the sparse budget, so attention is dense."""

    def __init__(self, sequence: SequenceModel, prefix: Tensor, room: int) -> None:
        self.sequence = sequence
        self.length = prefix.shape[1]
        run = sequence.begin(prefix, sparse=False, keep_states=True)
        hidden, _ = sequence.trunk(run)
        assert run.states is not None
        self.states = run.states
        for layer, state in zip(layers(sequence), self.states, strict=True):
            _trim(layer, state, room)
        self.history = run.history.view(run.batch, run.length, -1)[:, -1]
        self.hidden = hidden.view(run.batch, run.length, -1)[:, -1]

    def advance(self, tokens: Tensor) -> None:
        """Feeds one token per sequence ``[B]``; afterwards ``hidden`` predicts the next one."""
        trunk = self.sequence.model.model
        self.history = torch.cat([self.history[:, 1:], tokens[:, None]], 1)
        cos, sin = trunk.rotary(torch.full((1,), self.length, device=tokens.device))
        cos, sin = cos.expand(tokens.shape[0], -1), sin.expand(tokens.shape[0], -1)
        residual = trunk.embed(tokens, self.sequence.dtype)
        for layer, state in zip(layers(self.sequence), self.states, strict=True):
            residual = self._layer(layer, state, residual, cos, sin)
        self.length += 1
        self.hidden = trunk.hyper_connection_mixer(residual)

    def _layer(
        self, layer: DecoderLayer, state: LayerState, residual: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        if layer.ple is not None:
            assert state.ple is not None
            embedding = layer.ple.ple_embedding(self.history).to(residual.dtype)
            gated, normed = layer.ple.gate(residual, embedding)
            weight = layer.ple.conv1d.weight.squeeze(1).float()
            y, history = causal_conv1d_reference(normed[:, None], weight, state.ple, layer.ple.dilation)
            state.ple = history[:, 1:]
            residual = layer.ple.add(residual, gated, y[:, 0])
        x, inject = layer.attn_hyper_connection.read(residual)
        if layer.linear_attn is not None:
            mixer = layer.linear_attn
            assert state.conv is not None and state.delta is not None
            mixed = mixer.in_proj_qkv(x)
            y, history = causal_conv1d_reference(mixed[:, None], mixer.conv1d.weight.squeeze(1), state.conv)
            state.conv = history[:, 1:]
            q, k, v = mixer.heads(y.to(x.dtype))
            g, beta = mixer.gates(x)
            with torch.autocast(x.device.type, enabled=False):
                o, states = recurrent_gated_delta_reference(q, k, v, g[:, None], beta[:, None], state.delta)
            state.delta = states[:, -1]
            out = mixer.finish(o[:, 0].to(x.dtype), x)
        else:
            attention = layer.self_attn
            assert attention is not None and state.k is not None and state.v is not None
            q, k, v, gate = attention.project(x, cos, sin)
            state.k[:, :, self.length], state.v[:, :, self.length] = k, v
            group = attention.heads // attention.kv_heads
            grouped = q.unflatten(1, (attention.kv_heads, group))  # [B, Hkv, g, D]
            end = self.length + 1
            y = F.scaled_dot_product_attention(grouped, state.k[:, :, :end], state.v[:, :, :end])
            out = attention.finish(y.flatten(1, 2), gate)
        residual = layer.attn_hyper_connection.write(residual, out, inject)
        x, inject = layer.mlp_hyper_connection.read(residual)
        y, _ = row.moe_rows(layer.mlp, x)
        return layer.mlp_hyper_connection.write(residual, y, inject)


def _trim(layer: DecoderLayer, state: LayerState, room: int) -> None:
    """Keeps the rows that the convolutions still need, and makes room for more keys."""
    if layer.ple is not None and state.ple is not None:
        taps = layer.ple.conv1d.weight.shape[-1]
        state.ple = state.ple[:, -(taps - 1) * layer.ple.dilation :].float()
    if layer.linear_attn is not None and state.conv is not None:
        state.conv = state.conv[:, -(layer.linear_attn.conv1d.weight.shape[-1] - 1) :]
        assert state.delta is not None
        state.delta = state.delta.float()
    if state.k is not None and state.v is not None:
        state.k, state.v = F.pad(state.k, (0, 0, 0, room)), F.pad(state.v, (0, 0, 0, room))


@torch.no_grad()
def rollouts(sequence: SequenceModel, prefix: Tensor, total: int, temperature: Tensor) -> Tensor:
    """Continues ``prefix [B, P]`` to ``[B, total]``.

    Args:
        temperature: ``[B]``; 0 takes the most likely token.
    """
    decoder = RolloutDecoder(sequence, prefix, total - prefix.shape[1])
    tokens = [prefix]
    scale = temperature.clamp_min(1e-3)[:, None]
    while decoder.length < total:
        logits = F.linear(decoder.hidden, sequence.head).float()
        sampled = torch.multinomial((logits / scale).softmax(-1), 1)[:, 0]
        chosen = torch.where(temperature > 0, sampled, logits.argmax(-1))
        tokens.append(chosen[:, None])
        decoder.advance(chosen)
    return torch.cat(tokens, 1)
