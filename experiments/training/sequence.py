"""The training forward pass: the model's parameters and row-wise methods, with full-sequence mixers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.experiments.training import rows as row
from page4.experiments.training.attention import Chain, attend, attend_chain, index_loss
from page4.experiments.training.delta_rule import gated_delta_sequence
from page4.model import Qwen4ExpForCausalLM
from page4.model.decoder import DecoderLayer
from page4.model.gated_delta_net import GatedDeltaNet
from page4.model.qsa import QSAttention


@dataclass
class LayerState:
    """What a layer leaves behind for decoding after a prefix; absent parts are None.

    Attributes:
        conv: input of the short convolution ``[B, T, C]``. delta: final state ``[B, Hv, Dk, Dv]``.
        ple: input of the PLE convolution ``[B, T, S*H]``. k, v: ``[B, Hkv, T, D]``.
    """

    conv: Tensor | None = None
    delta: Tensor | None = None
    ple: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


@dataclass
class Pass:
    """One forward pass over ``ids [B, T]`` and the losses it gathers on the way.

    Attributes:
        cos, sin: of positions 0..T+K, ``[T + 8, rot]``. index_rows: rows that train the indexer, or None.
        states: filled per layer when decoding follows.
    """

    ids: Tensor
    positions: Tensor
    history: Tensor
    cos: Tensor
    sin: Tensor
    sparse: bool
    index_rows: Tensor | None = None
    balance: list[Tensor] = field(default_factory=list)
    index: list[Tensor] = field(default_factory=list)
    states: list[LayerState] | None = None

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.ids.shape[1]


def layers(sequence: SequenceModel) -> list[DecoderLayer]:
    """The trunk's layers."""
    return [cast(DecoderLayer, layer) for layer in sequence.model.model.layers]


class SequenceModel:
    """Runs a :class:`Qwen4ExpForCausalLM` over whole sequences, differentiably."""

    def __init__(self, model: Qwen4ExpForCausalLM, activation_dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = activation_dtype

    @property
    def head(self) -> Tensor:
        """Weight of the LM head ``[V, H]``."""
        lm_head = self.model.lm_head
        return self.model.model.embed_tokens.weight if lm_head is None else lm_head.weight

    def begin(
        self, ids: Tensor, sparse: bool, index_rows: Tensor | None = None, keep_states: bool = False
    ) -> Pass:
        """Prepares a pass over ``ids [B, T]``."""
        batch, length = ids.shape
        config = self.model.config
        with torch.no_grad():
            padded = F.pad(ids, (config.ngram_size - 1, 0), value=config.eos_token_id)
            history = padded.unfold(1, config.ngram_size, 1).flatten(0, 1)  # [N, n]
            positions = torch.arange(length, device=ids.device).repeat(batch)
            cos, sin = self.model.model.rotary(torch.arange(length + 8, device=ids.device))
        states: list[LayerState] | None = [] if keep_states else None
        return Pass(ids, positions, history.contiguous(), cos, sin, sparse, index_rows, states=states)

    def trunk(self, run: Pass) -> tuple[Tensor, Tensor]:
        """Hidden states for the LM head ``[N, H]`` and residual streams ``[N, S*H]``."""
        trunk = self.model.model
        residual = trunk.embed(run.ids.flatten(), self.dtype)
        for layer in layers(self):
            residual = self._layer(layer, residual, run)
        return row.mix_streams(trunk.hyper_connection_mixer, residual), residual

    def first_draft(self, run: Pass, streams: Tensor, next_tokens: Tensor) -> tuple[Tensor, Tensor, Chain]:
        """Draft step 0 on every row: hidden states, the head's streams, and what later steps need.

        ``next_tokens [B, T]`` holds x_{p+1} at row p.
        """
        head = self.model.mtp
        assert head is not None
        embedding = self.model.model.embed_tokens(next_tokens.flatten()).to(streams.dtype)
        kept: list[Chain] = []
        joined = row.mtp_inputs(head, embedding, streams)
        residual = self._layer(cast(DecoderLayer, head.layers[0]), joined, run, keep=kept)
        return row.mix_streams(head.hyper_connection_mixer, residual), residual, kept[0]

    def next_draft(
        self, run: Pass, streams: Tensor, tokens: Tensor, roots: Tensor, step: int, chain: Chain
    ) -> tuple[Tensor, Tensor]:
        """Draft step ``step`` >= 1 of the roots ``[n]``: streams ``[B*n, S*H]``, tokens ``[B*n]``."""
        head = self.model.mtp
        assert head is not None
        layer = cast(DecoderLayer, head.layers[0])
        embedding = self.model.model.embed_tokens(tokens).to(streams.dtype)
        residual = row.mtp_inputs(head, embedding, streams)
        x, inject = row.read_streams(layer.attn_hyper_connection, residual)
        attention = layer.self_attn
        assert attention is not None
        at = (roots + step).repeat(run.batch)
        q, k, v, gate = row.attention_inputs(attention, x, run.cos[at], run.sin[at])
        q, k, v = (t.unflatten(0, (run.batch, -1)).transpose(1, 2) for t in (q, k, v))
        rows_x = x.view(run.batch, -1, x.shape[-1])
        y = attend_chain(attention, q, k, v, rows_x, roots, step, chain, run.cos, run.sin, run.sparse)
        attended = y.transpose(1, 2).flatten(0, 1)
        return self._finish_draft(
            layer, residual, row.attention_output(attention, attended, gate), inject, run
        )

    def _finish_draft(
        self, layer: DecoderLayer, residual: Tensor, y: Tensor, inject: Tensor, run: Pass
    ) -> tuple[Tensor, Tensor]:
        head = self.model.mtp
        assert head is not None
        residual = self._mlp(layer, row.write_streams(layer.attn_hyper_connection, residual, y, inject), run)
        return row.mix_streams(head.hyper_connection_mixer, residual), residual

    def _mlp(self, layer: DecoderLayer, residual: Tensor, run: Pass) -> Tensor:
        x, inject = row.read_streams(layer.mlp_hyper_connection, residual)
        y, balance = row.moe_rows(layer.mlp, x)
        run.balance.append(balance)
        return row.write_streams(layer.mlp_hyper_connection, residual, y, inject)

    def _layer(
        self, layer: DecoderLayer, residual: Tensor, run: Pass, keep: list[Chain] | None = None
    ) -> Tensor:
        state = LayerState()
        if layer.ple is not None:
            residual, ple = row.ple_rows(layer.ple, residual, run.history, run.positions)
            state.ple = ple.view(run.batch, run.length, -1)
        x, inject = row.read_streams(layer.attn_hyper_connection, residual)
        if layer.linear_attn is not None:
            y = self._delta(layer.linear_attn, x, run, state)
        else:
            assert layer.self_attn is not None
            y = self._attention(layer.self_attn, x, run, state, keep)
        if run.states is not None:
            run.states.append(state)
        return self._mlp(layer, row.write_streams(layer.attn_hyper_connection, residual, y, inject), run)

    def _delta(self, mixer: GatedDeltaNet, x: Tensor, run: Pass, state: LayerState) -> Tensor:
        q, k, v, g, beta, mixed = row.delta_inputs(mixer, x, run.positions)
        shape = (run.batch, run.length)
        keep = run.states is not None
        q, k, v, g, beta = (t.unflatten(0, shape) for t in (q, k, v, g, beta))
        o, final = gated_delta_sequence(q, k, v, g, beta, keep)
        state.conv, state.delta = mixed.unflatten(0, shape), final
        return row.delta_output(mixer, o.flatten(0, 1), x)

    def _attention(
        self, attention: QSAttention, x: Tensor, run: Pass, state: LayerState, keep: list[Chain] | None
    ) -> Tensor:
        shape = (run.batch, run.length)
        at = run.positions
        q, k, v, gate = row.attention_inputs(attention, x, run.cos[at], run.sin[at])
        q, k, v = (t.unflatten(0, shape).transpose(1, 2) for t in (q, k, v))  # [B, heads, T, D]
        rows_x = x.unflatten(0, shape)
        cos, sin = run.cos[: run.length], run.sin[: run.length]
        y = attend(attention, q, k, v, rows_x, cos, sin, run.sparse)
        if run.index_rows is not None:
            detached = (q.detach(), k.detach(), rows_x.detach())
            run.index.append(index_loss(attention, *detached, cos, sin, run.index_rows))
        if keep is not None:
            keep.append(Chain(k, v, rows_x))
        state.k, state.v = k, v
        return row.attention_output(attention, y.transpose(1, 2).flatten(0, 1), gate)
