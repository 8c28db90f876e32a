"""What the layouts of 4-bit integer weights share: eight to an int32, and a scale per group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from page4.kernels.errors import InputError

WORD = 8
"""4-bit integers in an int32."""


def unpack(words: Tensor, order: tuple[int, ...] = tuple(range(WORD))) -> Tensor:
    """Integers 0 to 15, int32 ``[M, 8 W]``, of int32 words ``[M, W]``.

    Args:
        words: packed.
        order: which four bits of a word, from the lowest on, hold its first value, which its second, ...
    """
    shifts = 4 * torch.tensor(order, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(1)


def check_groups(name: str, inputs: int, groups: int, sizes: frozenset[int]) -> None:
    """Refuses groups of inputs of another size than the config names; -1 stands for all inputs."""
    allowed = {inputs if size == -1 else size for size in sizes}
    if groups < 1 or inputs % groups or inputs // groups not in allowed:
        sizes_said = " or ".join(str(size) for size in sorted(allowed))
        raise InputError(f"{name}: {inputs} inputs have {groups} scales, expected one for each {sizes_said}")
