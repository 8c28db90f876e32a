"""QSA over whole sequences: causal attention under the block mask, the indexer's loss, and draft chains."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred
from page4.model.qsa import Indexer, QSAttention


@dataclass
class Chain:
    """What later draft steps need: the head's K, V and inputs at step 0, and the chain's own K and V.

    Attributes:
        k, v: ``[B, Hkv, T, D]``. x: ``[B, T, H]``. drafted: (k, v) ``[B, Hkv, n, D]`` of every later step.
    """

    k: Tensor
    v: Tensor
    x: Tensor
    drafted: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def block_keys(indexer: Indexer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys of the complete blocks ``[B, nb, Di]`` of ``x [B, T, H]``; cos, sin are ``[T, rot]``."""
    ratio = indexer.ratio
    blocks = x.shape[1] // ratio
    raw = indexer.raw_key(indexer.index_qk_proj(x[:, : blocks * ratio]))
    mean = raw.unflatten(1, (blocks, ratio)).float().mean(2).to(raw.dtype)
    normed = rms_norm_zero_centred(mean, indexer.k_layernorm.weight, indexer.eps).unsqueeze(2)
    starts = slice(0, blocks * ratio, ratio)
    return apply_rope(normed, cos[starts], sin[starts]).squeeze(2)


def block_scores(indexer: Indexer, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor) -> Tensor:
    """Scores ``[B, n, nb]`` of rows ``x [B, n, H]``, FP32."""
    q = indexer.query(indexer.index_qk_proj(x), cos, sin)  # [B, n, Hi, Di]
    total = torch.zeros((), device=x.device)
    for head in range(indexer.heads):
        total = total + torch.relu((q[:, :, head] @ keys.transpose(1, 2)).float())
    return total * indexer.head_dim**-0.5


def token_mask(indexer: Indexer, scores: Tensor, positions: Tensor, length: int) -> Tensor:
    """Tokens ``[B, n, length]`` that rows at ``positions [n]`` read: chosen blocks and incomplete tail."""
    blocks = scores.shape[-1]
    complete = (positions + 1) // indexer.ratio  # [n]
    chosen = (torch.arange(blocks, device=scores.device) < complete[:, None]).expand_as(scores)
    if blocks > indexer.block_topk:
        # A score of zero (no head responds) is common; such ties go to the lower index, as at inference.
        order = -1e-6 * torch.arange(1, blocks + 1, device=scores.device)
        best = (
            torch.where(scores > 0, scores, order)
            .masked_fill(~chosen, -1.0)
            .topk(indexer.block_topk, -1)
            .indices
        )
        chosen = torch.zeros_like(chosen).scatter_(-1, best, True) & chosen
    mask = F.pad(chosen.repeat_interleave(indexer.ratio, -1), (0, length - blocks * indexer.ratio))
    tokens = torch.arange(length, device=scores.device)
    return mask | ((tokens >= (complete * indexer.ratio)[:, None]) & (tokens <= positions[:, None]))


def _repeat_heads(x: Tensor, attention: QSAttention) -> Tensor:
    return x.repeat_interleave(attention.heads // attention.kv_heads, 1)


def attend(
    attention: QSAttention, q: Tensor, k: Tensor, v: Tensor, x: Tensor, cos: Tensor, sin: Tensor, sparse: bool
) -> Tensor:
    """Causal attention ``[B, Hq, T, D]``, over the selected blocks where ``sparse``.

    Shapes: ``q [B, Hq, T, D]``, ``k, v [B, Hkv, T, D]``, ``x [B, T, H]``, ``cos, sin [T, rot]``. No gradient
    reaches the indexer from here: the selection is discrete, :func:`index_loss` trains it.
    """
    indexer = attention.indexer
    length = q.shape[2]
    k, v = _repeat_heads(k, attention), _repeat_heads(v, attention)
    budget = indexer.block_topk * indexer.ratio
    if not sparse or length <= budget:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with torch.no_grad():
        keys = block_keys(indexer, x, cos, sin)
    outputs = []
    rows = 2048 if length <= 16384 else 1024
    for start in range(0, length, rows):
        end = min(start + rows, length)
        q_rows, k_seen, v_seen = q[:, :, start:end], k[:, :, :end], v[:, :, :end]
        if start == 0 and end <= budget:
            outputs.append(F.scaled_dot_product_attention(q_rows, k_seen, v_seen, is_causal=True))
            continue
        with torch.no_grad():
            positions = torch.arange(start, end, device=x.device)
            seen = keys[:, : end // indexer.ratio]
            scores = block_scores(indexer, x[:, start:end], cos[start:end], sin[start:end], seen)
            mask = token_mask(indexer, scores, positions, end).unsqueeze(1)
        outputs.append(F.scaled_dot_product_attention(q_rows, k_seen, v_seen, attn_mask=mask))
    return torch.cat(outputs, 2)


def index_loss(
    attention: QSAttention, q: Tensor, k: Tensor, x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor
) -> Tensor:
    """KL of the head-averaged, block-pooled attention of ``rows [n]`` from the softmax of the index scores.

    q, k and x are detached by the caller: this loss trains the indexer alone.
    """
    indexer = attention.indexer
    batch, _, length, dim = q.shape
    ratio, blocks, group = indexer.ratio, length // indexer.ratio, attention.heads // attention.kv_heads
    count = rows.numel()
    with torch.no_grad():
        picked = q[:, :, rows].reshape(batch, attention.kv_heads, group * count, dim)
        logits = (picked @ k.transpose(-1, -2)).view(batch, attention.kv_heads, group, count, length).float()
        future = torch.arange(length, device=x.device) > rows[:, None]
        p = (
            (logits * attention.softmax_scale).masked_fill(future, -1e30).softmax(-1).mean((1, 2))
        )  # [B, n, T]
        p = p[..., : blocks * ratio].unflatten(-1, (blocks, ratio)).sum(-1)
        complete = torch.arange(blocks, device=x.device) < ((rows + 1) // ratio)[:, None]
        p = p * complete
        p = p / p.sum(-1, keepdim=True).clamp_min(1e-9)
    keys = block_keys(indexer, x, cos, sin)
    scores = block_scores(indexer, x[:, rows], cos[rows], sin[rows], keys).masked_fill(~complete, -1e30)
    log_q = scores.log_softmax(-1).clamp_min(-1e4)
    return (p * (p.clamp_min(1e-9).log() - log_q)).sum(-1).mean()


def attend_chain(
    attention: QSAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    rows: Tensor,
    step: int,
    chain: Chain,
    cos: Tensor,
    sin: Tensor,
    sparse: bool,
) -> Tensor:
    """Draft step ``step`` of the roots ``rows [n]``: keys up to the root, then the chain's own.

    Shapes: ``q [B, Hq, n, D]``, ``k, v [B, Hkv, n, D]``, ``x [B, n, H]``; returns ``[B, Hq, n, D]``.
    """
    indexer = attention.indexer
    batch, _, count, dim = q.shape
    length = chain.k.shape[2]
    kv_heads, group = attention.kv_heads, attention.heads // attention.kv_heads
    chain.drafted.append((k, v))
    grouped = q.unflatten(1, (kv_heads, group))  # [B, Hkv, g, n, D]
    scores = (grouped.flatten(2, 3) @ chain.k.transpose(-1, -2)).view(batch, kv_heads, group, count, length)
    if sparse and length > indexer.block_topk * indexer.ratio:
        with torch.no_grad():
            keys = block_keys(indexer, chain.x, cos, sin)
            index = block_scores(indexer, x, cos[rows + step], sin[rows + step], keys)
            mask = token_mask(indexer, index, rows, length)[:, None, None]
    else:
        mask = torch.arange(length, device=x.device) <= rows[:, None]
    own = [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in chain.drafted]
    joined = torch.cat([scores.masked_fill(~mask, -30000.0), *own], -1).float() * attention.softmax_scale
    p = joined.softmax(-1).to(v.dtype)
    y = (p[..., :length].reshape(batch, kv_heads, group * count, length) @ chain.v).view(
        batch, kv_heads, group, count, dim
    )
    for i, (_, value) in enumerate(chain.drafted):
        y = y + p[..., length + i : length + i + 1] * value.unsqueeze(2)
    return y.flatten(1, 2)
