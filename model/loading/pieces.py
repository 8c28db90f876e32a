"""Tensors that published checkpoints store in pieces: fused experts and n-gram tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A part of a tensor under a name of its own: ``whole[index]`` is stored as ``name``."""

    name: str
    whole: str
    index: tuple[int | slice, ...]


def pieces(name: str, whole: Tensor, ngram_parts: int) -> Iterator[Piece]:
    """The names under which published checkpoints store a tensor in pieces; none for most tensors.

    Fused experts ``experts.gate_up_proj [E, 2I, H]`` and ``experts.down_proj [E, H, I]`` come as one matrix
    per expert, ``ngram_embedding.weight`` as ``ngram_embedding.shard_{k}.weight`` of equally many rows.
    """
    if match := re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", name):
        for expert in range(whole.shape[0]):
            stem = f"{match[1]}.{expert}"
            if match[2] == "down_proj":
                yield Piece(f"{stem}.down_proj.weight", name, (expert,))
            else:
                half = whole.shape[1] // 2
                yield Piece(f"{stem}.gate_proj.weight", name, (expert, slice(0, half)))
                yield Piece(f"{stem}.up_proj.weight", name, (expert, slice(half, 2 * half)))
    elif name.endswith(".ngram_embedding.weight"):
        rows = -(-whole.shape[0] // ngram_parts)
        for k, start in enumerate(range(0, whole.shape[0], rows)):
            stem = name.removesuffix("weight")
            yield Piece(f"{stem}shard_{k}.weight", name, (slice(start, start + rows),))
