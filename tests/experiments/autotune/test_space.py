"""What is tried: every useful number of splits and every tile that has room, nothing impossible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import hypothesis
import pytest
from hypothesis import strategies as st

from page4.experiments.autotune.problem import Candidates
from page4.experiments.autotune.space import (
    gluon_candidates,
    gluon_shared_bytes,
    longest_turns,
    named_choices,
    plain_candidates,
    split_counts,
    tile_registers,
)
from page4.experiments.kernel_cases import attention_copies
from page4.kernels.page4_attention_gluon import GluonConfig
from page4.kernels.page4_attention_merge_triton import MAX_SPLITS
from page4.kernels.page4_attention_triton import AttentionConfig
from tests.experiments.autotune.cpu_machine import CPU, cpu_machine, small_cell, small_step

SHARED = 227 * 1024


@pytest.mark.parametrize(
    ("programs", "turns", "expected"),
    [
        (1, 33, [17, 33]),  # a whole GPU for one list: a program for one tile or two
        (128, 42, [1, 2, 3, 4, 5]),
        (8, 42, [2, 3, 4, 5, 6, 7, 9, 11, 14, 21, 42]),
        (4096, 500, [1]),
        (1, 1, [1]),
    ],
)
def test_splits_fill_the_multiprocessors(programs: int, turns: int, expected: list[int]) -> None:
    assert split_counts(programs, turns, multiprocessors=132) == expected


@hypothesis.given(st.integers(1, 5000), st.integers(1, 600), st.integers(1, 150))
def test_splits_are_possible_and_none_does_the_work_of_a_smaller_number(
    programs: int, turns: int, multiprocessors: int
) -> None:
    counts = split_counts(programs, turns, multiprocessors)
    assert counts == sorted(set(counts))
    assert counts and counts[0] >= 1 and counts[-1] <= min(MAX_SPLITS, turns)
    assert programs * counts[-1] <= 4 * multiprocessors + programs
    longest = [-(-turns // splits) for splits in counts]
    assert len(set(longest)) == len(longest)


def test_turns_are_those_of_the_longest_list() -> None:
    inputs = attention_copies(small_step(), CPU)[0]
    longest = int(inputs.plan.counts.max())
    assert longest > 8  # 6 selected blocks a row, half of them shared, and the tail
    assert longest_turns(inputs, 16) == -(-longest // 4)
    assert longest_turns(inputs, 1024) == 1


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("kv_format", ["e4m3", "fp16"])
def test_candidates_are_possible_and_have_room_in_registers(head_dim: int, kv_format: str) -> None:
    step = small_step(head_dim=head_dim, kv_format=kv_format, rows=8, query_heads=12)
    inputs = attention_copies(step, CPU)[0]
    gluon, plain = gluon_candidates(inputs, 132, SHARED), plain_candidates(inputs, 132, SHARED)
    assert plain and (gluon or head_dim == 32)
    for config in gluon:
        config.check(head_dim, inputs.heads_per_kv, inputs.rows_per_group, kv_format)
        parts = config.head_splits
        assert tile_registers(inputs, config.tile_tokens, config.num_warps, tiles=1, parts=parts) <= 255
        assert gluon_shared_bytes(inputs, config) <= SHARED
    for other in plain:
        assert tile_registers(inputs, other.tile_tokens, other.num_warps, tiles=2) <= 255
    assert len(set(gluon)) == len(gluon) and len(set(plain)) == len(plain)
    # 96, 48 and 32 members are padded to 128, 64 and 32; four programs of 24 members would be no smaller.
    assert not gluon or {config.head_splits for config in gluon} == {1, 2, 3}


def test_bytes_take_half_the_registers_of_halves() -> None:
    members, dim, tile, threads = 16, 256, 64, 128
    for kv_format, words in (("e4m3", 64), ("fp16", 128)):
        inputs = attention_copies(small_step(head_dim=256, rows=1, kv_format=kv_format), CPU)[0]
        expected = (members * dim + members * tile + 2 * tile * words) // threads
        assert tile_registers(inputs, tile, threads // 32, tiles=2) == expected


def test_the_default_is_among_what_is_compiled_and_comes_first() -> None:
    found = Candidates.of(small_cell(), cpu_machine(), seed=0)
    assert found.configs[0] == found.default
    assert len(set(found.configs)) == len(found.configs) > 10


def test_fields_that_choose_between_names_are_tried_with_every_name() -> None:
    @dataclass
    class Config:
        splits: int
        instruction: Literal["mma", "wgmma"] = "mma"
        order: Literal["up", "down"] = "up"

    assert named_choices(Config) == [
        {"instruction": "mma", "order": "up"},
        {"instruction": "mma", "order": "down"},
        {"instruction": "wgmma", "order": "up"},
        {"instruction": "wgmma", "order": "down"},
    ]
    assert named_choices(AttentionConfig) == [{}]


def test_rings_that_no_program_can_have_are_not_tried() -> None:
    inputs = attention_copies(small_step(head_dim=256, kv_format="fp16"), CPU)[0]
    largest = GluonConfig(1, 128, 8, 4)  # 4 stages of K and V, 64 KiB each
    assert gluon_shared_bytes(inputs, largest) > 2 * 4 * 65536 > SHARED
    found = gluon_candidates(inputs, 132, SHARED)
    assert largest not in found
    assert largest in gluon_candidates(inputs, 132, 2**20)
    assert {config.num_stages for config in found} == {2, 3, 4}
