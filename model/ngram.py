"""Hashed n-gram embeddings: the table that PLE reads."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Qwen4ExpConfig
from .weights import Weight

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(value: int) -> int:
    """One output of the SplitMix64 generator (Steele, Lea & Flood 2014) for the state ``value``."""
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (value ^ (value >> 31)) & _MASK64


def primes_from(start: int, count: int) -> list[int]:
    """The first ``count`` primes that are at least ``start``."""
    found: list[int] = []
    candidate = start - 1
    while len(found) < count:
        candidate += 1
        odd = candidate == 2 or (candidate > 2 and candidate % 2 == 1)
        if odd and all(candidate % d for d in range(3, math.isqrt(candidate) + 1, 2)):
            found.append(candidate)
    return found


class NGramEmbedding(nn.Module):
    """Embeds the 2- to n-grams that end at a token by multiply-xor hashing into prime-sized tables.

    ``m_k = xor_{i<k} ctx_i * M_i``; head h of the k-grams reads row ``m_k mod prime_h + offset_h``; the heads
    are concatenated. The context of a token is cut at an EOS *before* it and starts with EOS. ``index``
    counts the PLE layers before this one: every layer draws further primes and its own multipliers.
    Source: Qwen4Exp reference implementation (transformers).
    """

    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(self, config: Qwen4ExpConfig, index: int = 0) -> None:
        super().__init__()
        self.eos = config.eos_token_id
        self.n = config.ngram_size
        self.heads = config.heads_per_ngram
        total = (self.n - 1) * self.heads
        sizes = primes_from(config.ngram_vocab_size_base, (index + 1) * total)[index * total :]
        offsets = [sum(sizes[:i]) for i in range(total)]
        half = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
        base = config.seed + 10007 * index
        multipliers = [
            2 * (splitmix64((base + _GOLDEN * (i + 1)) & _MASK64) % half) + 1 for i in range(self.n)
        ]
        self.register_buffer("layer_multipliers", torch.tensor(multipliers))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(sizes))
        self.register_buffer("ngram_heads_offsets", torch.tensor(offsets))
        pad = config.make_ngram_vocab_size_divisible_by
        rows = -(-sum(sizes) // pad) * pad
        self.ngram_embedding = Weight(rows, config.ple_embed_dim // total, std=0.5)

    def context(self, history: Tensor) -> Tensor:
        """Token contexts cut at EOS.

        Args:
            history: ``[N, n]`` int64, the last n token ids ending at each row (oldest first), EOS where the
                sequence had not begun.
        Returns:
            ``[n, N]``: the token itself, then the ones before it, EOS from the first EOS on.
        """
        context = [history[:, -1]]
        cut = torch.zeros_like(history[:, 0], dtype=torch.bool)
        for back in range(1, self.n):
            token = history[:, self.n - 1 - back]
            cut = cut | (token == self.eos)
            context.append(torch.where(cut, self.eos, token))
        return torch.stack(context)

    def forward(self, history: Tensor) -> Tensor:
        """``[N, n]`` token histories (see :meth:`context`) to embeddings ``[N, ple_embed_dim]``."""
        context = self.context(history)
        hashed = context[0] * self.layer_multipliers[0]
        rows = []
        for k in range(1, self.n):
            hashed = hashed ^ (context[k] * self.layer_multipliers[k])
            heads = slice((k - 1) * self.heads, k * self.heads)
            rows.append(
                torch.remainder(hashed.unsqueeze(-1), self.ngram_heads_vocab_sizes[heads])
                + self.ngram_heads_offsets[heads]
            )
        return F.embedding(torch.cat(rows, -1), self.ngram_embedding.weight).flatten(-2)
