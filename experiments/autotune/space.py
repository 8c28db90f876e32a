"""The configurations that are tried for a call of grouped attention."""

from __future__ import annotations

import math

from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_gluon import GluonConfig
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import MAX_SPLITS
from page4.kernels.page4_attention_triton import AttentionConfig, padded_members

_REGISTERS = 255  # of a thread
_PER_MULTIPROCESSOR = (0.25, 8.0)  # programs that a split may lead to


def split_counts(programs: int, turns: int, multiprocessors: int) -> list[int]:
    """Numbers of splits worth trying for ``programs`` lists of ``turns`` tiles each.

    Splits that leave the longest program as many turns as fewer splits would are of no use: only
    ``ceil(turns / n)`` are. They should give every multiprocessor about a quarter to 8 programs; of two
    numbers that differ by less than a tenth the smaller one is enough.
    """
    share = multiprocessors / max(1, programs)
    most = max(1, min(MAX_SPLITS, turns, math.ceil(_PER_MULTIPROCESSOR[1] * share)))
    useful = sorted({splits for n in range(1, turns + 1) if (splits := -(-turns // n)) <= most})
    least = min(useful[-1], int(_PER_MULTIPROCESSOR[0] * share))
    counts: list[int] = []
    for splits in useful:
        if splits >= least and (not counts or splits > 1.1 * counts[-1]):
            counts.append(splits)
    return counts


def longest_turns(inputs: AttentionInputs, tile_tokens: int) -> int:
    """Tiles of the longest list of the plan. Synchronises with the device."""
    longest = int(inputs.plan.counts.max()) if inputs.groups else 0
    return max(1, -(-longest * BLOCK_TOKENS // tile_tokens))


def gluon_candidates(inputs: AttentionInputs, multiprocessors: int) -> list[GluonConfig]:
    """Gluon configurations whose tiles have room in the registers, ascending."""
    programs = inputs.groups * inputs.kv_heads
    candidates = []
    for num_warps in (1, 2, 4, 8):
        for tile_tokens in (32, 64, 128):
            config = GluonConfig(1, tile_tokens, num_warps)
            try:
                config.check(inputs.head_dim)
            except InputError:
                continue
            if tile_registers(inputs, tile_tokens, num_warps) > _REGISTERS:
                continue
            turns = longest_turns(inputs, tile_tokens)
            candidates += [
                GluonConfig(splits, tile_tokens, num_warps)
                for splits in split_counts(programs, turns, multiprocessors)
            ]
    return candidates


def plain_candidates(inputs: AttentionInputs, multiprocessors: int) -> list[AttentionConfig]:
    """Plain Triton configurations whose tiles have room in the registers, ascending."""
    programs = inputs.groups * inputs.kv_heads
    return [
        AttentionConfig(splits, tile_tokens, num_warps, num_stages)
        for tile_tokens in (16, 32, 64, 128)
        for num_warps in (4, 8)
        if tile_registers(inputs, tile_tokens, num_warps) <= _REGISTERS
        for num_stages in (1, 2, 3)
        for splits in split_counts(programs, longest_turns(inputs, tile_tokens), multiprocessors)
    ]


def tile_registers(inputs: AttentionInputs, tile_tokens: int, num_warps: int) -> int:
    """32-bit registers a thread that accumulators, scores and the tiles of K and V take at the least."""
    members, dim = padded_members(inputs), inputs.head_dim
    tiles = 2 * tile_tokens * dim * inputs.k_pages.element_size() // 4
    return (members * dim + members * tile_tokens + tiles) // (32 * num_warps)
