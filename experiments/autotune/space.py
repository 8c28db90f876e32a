"""The configurations that are tried for a call of grouped attention."""

from __future__ import annotations

import itertools
import math
import typing
from typing import Any, Literal, get_origin

from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_dispatch import device_capability
from page4.kernels.page4_attention_gluon import GluonConfig, can_run
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import MAX_SPLITS
from page4.kernels.page4_attention_triton import AttentionConfig, padded_members
from page4.kernels.volta_tiles import MEMBERS

_REGISTERS = 255  # of a thread
_PER_MULTIPROCESSOR = (0.125, 4.0)  # programs that splits may lead to
_STEP = 1.15  # the least ratio of two numbers of splits


def split_counts(programs: int, turns: int, multiprocessors: int) -> list[int]:
    """Numbers of splits worth trying for ``programs`` lists of ``turns`` tiles each.

    Splits that leave the longest program as many turns as fewer splits would are of no use: only
    ``ceil(turns / n)`` are. They should give every multiprocessor about an eighth to 4 programs; of two
    numbers that are nearly the same the smaller one is enough.
    """
    share = multiprocessors / max(1, programs)
    most = max(1, min(MAX_SPLITS, turns, math.ceil(_PER_MULTIPROCESSOR[1] * share)))
    useful = sorted({splits for n in range(1, turns + 1) if (splits := -(-turns // n)) <= most})
    least = min(useful[-1], int(_PER_MULTIPROCESSOR[0] * share))
    counts: list[int] = []
    for splits in useful:
        if splits >= least and (not counts or splits >= _STEP * counts[-1]):
            counts.append(splits)
    return counts


def longest_turns(inputs: AttentionInputs, tile_tokens: int) -> int:
    """Tiles of the longest list of the plan. Synchronises with the device."""
    longest = int(inputs.plan.counts.max()) if inputs.groups else 0
    return max(1, -(-longest * BLOCK_TOKENS // tile_tokens))


def gluon_candidates(inputs: AttentionInputs, multiprocessors: int, shared_memory: int) -> list[GluonConfig]:
    """Gluon configurations whose tiles have room in registers and shared memory (bytes of a program)."""
    programs = inputs.groups * inputs.kv_heads
    capability = device_capability(inputs.q.device)
    instructions = [
        names for names in named_choices(GluonConfig)
        if capability is None or can_run(names["instruction"], capability)
    ]  # fmt: skip
    parts_of_heads = head_splits(inputs, MEMBERS if capability == (7, 0) else 16)
    tiles = itertools.product((1, 2, 4, 8), (32, 64, 128), (2, 3, 4), instructions, parts_of_heads)
    candidates = []
    for num_warps, tile_tokens, num_stages, names, parts in tiles:
        try:
            GluonConfig(1, tile_tokens, num_warps, num_stages, head_splits=parts, **names).check(
                inputs.head_dim, inputs.heads_per_kv, inputs.rows_per_group, inputs.kv_format
            )
        except InputError:
            continue
        # One tile is in registers while the others are in shared memory.
        if tile_registers(inputs, tile_tokens, num_warps, tiles=1, parts=parts) > _REGISTERS:
            continue
        turns = longest_turns(inputs, tile_tokens)
        for splits in split_counts(programs * parts, turns, multiprocessors):
            config = GluonConfig(splits, tile_tokens, num_warps, num_stages, head_splits=parts, **names)
            if gluon_shared_bytes(inputs, config) <= shared_memory:
                candidates.append(config)
    return candidates


def head_splits(inputs: AttentionInputs, tile: int = 16) -> list[int]:
    """Numbers of programs for the heads of a KV head that leave fewer tiles of members each: up to 4."""
    heads = inputs.heads_per_kv
    divisors = [parts for parts in range(1, min(4, heads) + 1) if heads % parts == 0]
    members = [-(-inputs.rows_per_group * heads // (parts * tile)) for parts in divisors]
    return [parts for i, parts in enumerate(divisors) if i == 0 or members[i] < members[i - 1]]


def named_choices(config: type[Any]) -> list[dict[str, Any]]:
    """Every combination of the names that a configuration's fields can choose from; [{}] without such."""
    hints = typing.get_type_hints(config)
    choices = {name: typing.get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    return [dict(zip(choices, names, strict=True)) for names in itertools.product(*choices.values())]


def plain_candidates(
    inputs: AttentionInputs, multiprocessors: int, shared_memory: int
) -> list[AttentionConfig]:
    """Plain Triton configurations whose tiles have room in registers and shared memory (bytes)."""
    programs = inputs.groups * inputs.kv_heads
    return [
        AttentionConfig(splits, tile_tokens, num_warps, num_stages)
        for tile_tokens, num_warps, num_stages in itertools.product((16, 32, 64, 128), (4, 8), (1, 2, 3))
        if tile_registers(inputs, tile_tokens, num_warps, tiles=2) <= _REGISTERS
        # With stages, Triton keeps what is on its way in shared memory.
        and (num_stages - 1) * 2 * tile_bytes(inputs, tile_tokens) <= shared_memory
        for splits in split_counts(programs, longest_turns(inputs, tile_tokens), multiprocessors)
    ]


def tile_bytes(inputs: AttentionInputs, tile_tokens: int) -> int:
    """Bytes of a tile of K or V as stored."""
    return tile_tokens * inputs.head_dim * inputs.k_pages.element_size()


def tile_registers(
    inputs: AttentionInputs, tile_tokens: int, num_warps: int, tiles: int, parts: int = 1
) -> int:
    """32-bit registers a thread that accumulators, scores and tiles of K and V take at the least."""
    members = padded_members(inputs, parts)
    words = members * (inputs.head_dim + tile_tokens) + tiles * tile_bytes(inputs, tile_tokens) // 4
    return words // (32 * num_warps)


def gluon_shared_bytes(inputs: AttentionInputs, config: GluonConfig) -> int:
    """Bytes of shared memory that a program takes at the least: the rings of K and V, its list, and Q."""
    rings = 2 * config.num_stages * tile_bytes(inputs, config.tile_tokens)
    entries = -(-inputs.plan.blocks.shape[1] // config.splits)
    return rings + 8 * entries + 2 * padded_members(inputs, config.head_splits) * inputs.head_dim
