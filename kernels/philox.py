"""Counter-based random numbers: a request's depend on its seed, the position and the purpose only."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a random number decides; no two purposes share noise."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2
    BONUS = 3


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox 4x32 with 10 rounds: ``counter`` ``[..., 4]`` and ``key`` ``[..., 2]`` to ``[..., 4]``.

    All are 32-bit words in int64.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        # Products wrap around as int64, which leaves their 64 bits as they are.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def random_words(seed: Tensor, position: Tensor, purpose: Tensor | int) -> Tensor:
    """Four 32-bit words in int64 ``[..., 4]`` for int64 seeds and positions ``[...]``.

    The seed is the key; the counter is the position (two words), the purpose and 0.
    """
    purposes = torch.as_tensor(purpose, dtype=torch.int64, device=position.device)
    seed, position, purposes = torch.broadcast_tensors(seed, position, purposes)
    counter = (position & _WORD, (position >> 32) & _WORD, purposes, torch.zeros_like(position))
    key = (seed & _WORD, (seed >> 32) & _WORD)
    return philox4x32(torch.stack(counter, dim=-1), torch.stack(key, dim=-1))


def uniform(words: Tensor) -> Tensor:
    """float64 multiples of 2^-53 in [0, 1), from the upper 53 of the bits of two words ``[..., 2]``."""
    high, low = words.unbind(-1)
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def below(words: Tensor, limit: Tensor) -> Tensor:
    """Integers of ``0 .. limit - 1``: ``floor(limit * x / 2^64)``, x the 64 bits of two words ``[..., 2]``.

    ``limit`` is int64 below 2^62; a limit of 0 gives 0. Of two integers, one is at most
    ``limit / 2^64`` more probable than the other, relatively.
    """
    high, low = words.unbind(-1)
    limit_high, limit_low = limit >> 32, limit & _WORD

    def upper(x: Tensor) -> Tensor:
        return (x >> 32) & _WORD

    # Each product has at most 64 bits, which wrap around but stay.
    middle, other, least = high * limit_low, low * limit_high, low * limit_low
    carry = ((middle & _WORD) + (other & _WORD) + upper(least)) >> 32
    return high * limit_high + upper(middle) + upper(other) + carry
