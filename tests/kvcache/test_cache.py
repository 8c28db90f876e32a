"""Sizes of a cache, and snapshots of a request."""

from __future__ import annotations

import pytest
import torch

from page4.kernels.errors import InputError
from page4.kvcache import CacheConfig
from page4.model import Qwen4ExpForCausalLM
from tests.kvcache.scenario import TOKENS
from tests.oracle.steps import Stepper


def test_a_snapshot_undoes_whatever_ran_since(model: Qwen4ExpForCausalLM) -> None:
    undone, straight = Stepper(model), Stepper(model)
    for stepper in (undone, straight):
        stepper.prefill(TOKENS[:30])
        stepper.decode(TOKENS[30:34], keep=2)
    snapshot = undone.cache.snapshot([undone.request])
    tokens, read_slot = list(undone.tokens), undone.read_slot
    undone.decode([3, 4, 5, 6, 7], keep=4)
    undone.prefill([9] * 13)  # around the rings of raw index keys
    undone.cache.restore([undone.request], snapshot)
    undone.tokens, undone.read_slot = tokens, read_slot
    assert torch.equal(undone.decode(TOKENS[32:36]), straight.decode(TOKENS[32:36]))


def test_a_snapshot_is_a_copy(model: Qwen4ExpForCausalLM) -> None:
    stepper = Stepper(model)
    stepper.prefill(TOKENS[:10])
    snapshot = stepper.cache.snapshot([stepper.request])
    kept = [t.clone() for t in snapshot]
    stepper.decode(TOKENS[10:12])
    assert all(torch.equal(a, b) for a, b in zip(snapshot, kept, strict=True))


def test_a_cache_without_room_is_refused(model: Qwen4ExpForCausalLM) -> None:
    with pytest.raises(InputError, match="max_requests is 0, expected at least 1"):
        model.new_cache(CacheConfig(max_requests=0))
    with pytest.raises(InputError, match="max_tokens is 0, expected at least 1"):
        model.new_cache(CacheConfig(max_tokens=0))


@pytest.mark.parametrize("lengths", [(100,), (33, 33, 34), (1, 1, 98), (49, 50, 1)])
def test_max_tokens_is_what_all_requests_hold_together(
    model: Qwen4ExpForCausalLM, lengths: tuple[int, ...]
) -> None:
    """However the tokens are spread, part-filled last pages take nothing away."""
    cache = model.new_cache(CacheConfig(max_requests=3, max_tokens=100))
    for length in lengths:
        cache.reserve(cache.open(), length)
    cache.tables.check()
