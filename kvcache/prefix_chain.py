"""What a page contains, as a name: a chain of hashes over the tokens up to its end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from .pages import PAGE_TOKENS

Key = bytes
"""Names a prefix: its tokens, and the model and cache that computed it."""


_TOKEN_BYTES = array("q").itemsize


class PrefixChain:
    """Keys of a prompt's prefixes.

    The key of a prefix of n tokens is ``blake2b(key of the pages before its last, tokens of its last page)``.
    The chain begins with the identity of model and cache, so nothing of another one is ever found.

    The MTP layer's row p is computed from the token at p + 1. With ``lookahead`` 1 a key covers that token,
    too: equal keys mean equal bytes in the draft's pages as in the target's, and a prompt that goes on
    differently right after the prefix does not find it.

    Args:
        root: :func:`identity_key`.
        tokens: of the prompt.
        length: tokens of the longest prefix; ``length + lookahead`` of ``tokens`` are read.
        lookahead: 1 if drafts are cached, else 0.
    """

    def __init__(self, root: Key, tokens: Sequence[int], length: int, lookahead: int) -> None:
        self.length = length
        self._tokens = array("q", tokens[: length + lookahead]).tobytes()
        self._ahead = lookahead * _TOKEN_BYTES
        self._full = [_hash(root, self._tokens[: self._ahead])]
        for start in range(0, length - PAGE_TOKENS + 1, PAGE_TOKENS):
            self._full.append(self._next(start, start + PAGE_TOKENS))

    def key(self, length: int) -> Key:
        """Key of the first ``length`` tokens."""
        pages, rest = divmod(length, PAGE_TOKENS)
        return self._next(length - rest, length) if rest else self._full[pages]

    def page_keys(self, start: int, stop: int) -> list[Key]:
        """Keys of the pages that hold positions ``start`` (the first of a page) to ``stop - 1``."""
        keys = self._full[start // PAGE_TOKENS + 1 : stop // PAGE_TOKENS + 1]
        return keys if stop % PAGE_TOKENS == 0 else [*keys, self.key(stop)]

    def _next(self, start: int, stop: int) -> Key:
        first, end = start * _TOKEN_BYTES + self._ahead, stop * _TOKEN_BYTES + self._ahead
        return _hash(self._full[start // PAGE_TOKENS], self._tokens[first:end])


def identity_key(identity: Mapping[str, str]) -> Key:
    """Root of the chains of one model and cache."""
    return hashlib.blake2b(repr(sorted(identity.items())).encode(), digest_size=32).digest()


def _hash(parent: Key, tokens: bytes) -> Key:
    return hashlib.blake2b(parent + tokens, digest_size=32).digest()
