"""The row-wise steps of a training forward pass, each on flat rows and compiled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.experiments.training.compiled import rowwise
from page4.model.gated_delta_net import GatedDeltaNet
from page4.model.hyper_connection import HyperConnection
from page4.model.moe import MoE
from page4.model.mtp import MTPHead
from page4.model.ple import PerLayerEmbedding
from page4.model.qsa import QSAttention


def _causal_conv(x: Tensor, weight: Tensor, positions: Tensor, dilation: int) -> Tensor:
    """Depthwise causal convolution of flat rows, FP32; rows before a sequence's start count as zero."""
    taps = weight.shape[-1]
    kernel = weight.squeeze(1).float()
    y = x.float() * kernel[:, taps - 1]
    for back in range(1, taps):
        shift = back * dilation
        shifted = F.pad(x, (0, 0, shift, 0))[: x.shape[0]].float()
        y = y + torch.where((positions >= shift)[:, None], shifted, 0.0) * kernel[:, taps - 1 - back]
    return y


@rowwise
def read_streams(connection: HyperConnection, residual: Tensor) -> tuple[Tensor, Tensor]:
    """:meth:`HyperConnection.read`."""
    return connection.read(residual)


@rowwise
def write_streams(connection: HyperConnection, residual: Tensor, y: Tensor, inject: Tensor) -> Tensor:
    """:meth:`HyperConnection.write`."""
    return connection.write(residual, y, inject)


@rowwise
def mix_streams(connection: HyperConnection, residual: Tensor) -> Tensor:
    """The final mixer."""
    return connection(residual)


@rowwise
def delta_inputs(
    mixer: GatedDeltaNet, x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log decay, write strength, and the convolution's input (what decoding has to remember)."""
    mixed = mixer.in_proj_qkv(x)
    q, k, v = mixer.heads(_causal_conv(mixed, mixer.conv1d.weight, positions, 1).to(x.dtype))
    g, beta = mixer.gates(x)
    return q, k, v, g, beta, mixed


@rowwise
def delta_output(mixer: GatedDeltaNet, o: Tensor, x: Tensor) -> Tensor:
    """:meth:`GatedDeltaNet.finish`."""
    return mixer.finish(o, x)


@rowwise
def attention_inputs(
    attention: QSAttention, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:meth:`QSAttention.project`."""
    return attention.project(x, cos, sin)


@rowwise
def attention_output(attention: QSAttention, attended: Tensor, gate: Tensor) -> Tensor:
    """:meth:`QSAttention.finish`."""
    return attention.finish(attended, gate)


@rowwise
def ple_rows(
    ple: PerLayerEmbedding, residual: Tensor, history: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """:class:`PerLayerEmbedding` over whole sequences; also returns the convolution's input."""
    embedding = ple.ple_embedding(history).to(residual.dtype)
    gated, normed = ple.gate(residual, embedding)
    convolved = _causal_conv(normed, ple.conv1d.weight, positions, ple.dilation)
    return ple.add(residual, gated, convolved), normed


@rowwise
def moe_rows(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """:class:`MoE` with every expert computed for every row, and the load-balancing loss.

    With few small experts this is faster than sorting rows, and it is one graph. Balance is Switch's
    ``E * sum_e load_e * mean_e p_e``: 1 when the load is even.
    """
    p = moe.router_probabilities(x)  # [N, E]
    experts = torch.arange(p.shape[-1], device=p.device)
    left, chosen = p, torch.zeros_like(p)
    for _ in range(moe.top_k):
        best = (left.argmax(-1, keepdim=True) == experts).to(p.dtype)
        chosen = chosen + best
        left = left - 2 * best
    weights = p * chosen
    if moe.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    gate_up, down = moe.experts.gate_up_proj, moe.experts.down_proj
    count, double, hidden = gate_up.shape
    projected = F.linear(x, gate_up.reshape(count * double, hidden)).unflatten(-1, (count, 2, double // 2))
    inner = F.silu(projected[:, :, 0]) * projected[:, :, 1] * weights.unsqueeze(-1)  # [N, E, I]
    routed = F.linear(inner.to(x.dtype).flatten(1), down.permute(1, 0, 2).reshape(hidden, -1))
    balance = count * (chosen.mean(0).detach() / moe.top_k * p.mean(0)).sum()
    return routed + moe.shared(x), balance


@rowwise
def mtp_inputs(head: MTPHead, embedding: Tensor, streams: Tensor) -> Tensor:
    """:meth:`MTPHead.combine`."""
    return head.combine(embedding, streams)


@rowwise
def text_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the text, nats per token."""
    return F.cross_entropy(F.linear(hidden, head).float(), targets)


@rowwise
def trunk_loss(hidden: Tensor, head: Tensor, teacher: Tensor, weight: Tensor, hard_weight: float) -> Tensor:
    """Mean of ``KL(trunk || draft) + hard_weight * CE(argmax trunk, draft)`` over weighted rows.

    The trunk's distribution (of hidden states ``teacher``) is a constant.
    """
    target_logits = F.linear(teacher, head).float().detach()
    target = target_logits.log_softmax(-1)
    draft = F.linear(hidden, head).float().log_softmax(-1)
    loss = (target.exp() * (target - draft)).sum(-1)
    if hard_weight:
        loss = loss - hard_weight * draft.gather(-1, target_logits.argmax(-1, keepdim=True)).squeeze(-1)
    return (loss * weight).sum() / weight.sum().clamp_min(1e-6)


@rowwise
def greedy_tokens(hidden: Tensor, head: Tensor) -> Tensor:
    """Most likely token of every row."""
    return F.linear(hidden, head).argmax(-1)
