"""Accesses to shared memory with and without the barriers that they need."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.ptx_shared import SharedMemory

FIRST, SECOND = np.array([0]), np.array([1])  # warps
ONES, TWOS = np.full((1, 4), 1, np.uint8), np.full((1, 4), 2, np.uint8)


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(64)


def at(memory: SharedMemory, address: int) -> np.ndarray:
    return memory.places(np.array([address]), 4)


def test_a_warp_reads_what_it_wrote_and_others_after_a_barrier(memory: SharedMemory) -> None:
    memory.store(at(memory, 8), ONES, FIRST)
    assert (memory.load(at(memory, 8), FIRST) == 1).all()
    with pytest.raises(AssertionError, match="another warp wrote this"):
        memory.load(at(memory, 8), SECOND)
    memory.barrier()
    assert (memory.load(at(memory, 8), SECOND) == 1).all()


def test_a_warp_writes_what_it_read_and_others_after_a_barrier(memory: SharedMemory) -> None:
    memory.load(at(memory, 8), FIRST)
    memory.store(at(memory, 8), ONES, FIRST)
    with pytest.raises(AssertionError, match="another warp read this"):
        memory.store(at(memory, 8), TWOS, SECOND)
    with pytest.raises(AssertionError, match="another warp read this"):
        memory.will_store(at(memory, 8), SECOND)
    memory.store(at(memory, 12), TWOS, SECOND)
    memory.barrier()
    memory.store(at(memory, 8), TWOS, SECOND)


def test_warps_may_write_the_same_but_nothing_else(memory: SharedMemory) -> None:
    memory.store(at(memory, 8), ONES, FIRST)
    memory.store(at(memory, 8), ONES, SECOND)
    assert (memory.load(at(memory, 8), SECOND) == 1).all()
    with pytest.raises(AssertionError, match="another warp wrote here"):
        memory.store(at(memory, 8), TWOS, SECOND)


def test_warps_of_one_instruction_are_told_apart(memory: SharedMemory) -> None:
    places = memory.places(np.array([8, 8]), 4)
    both = np.concatenate((FIRST, SECOND))
    with pytest.raises(AssertionError, match="another warp wrote here"):
        memory.store(places, np.concatenate((ONES, TWOS)), both)


@pytest.mark.parametrize(("address", "message"), [(2, "misaligned"), (64, "outside")])
def test_impossible_addresses_are_refused(memory: SharedMemory, address: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        at(memory, address)


def test_what_was_never_written_is_nan(memory: SharedMemory) -> None:
    assert np.isnan(memory.load(at(memory, 0), FIRST).view(np.float32)).all()
