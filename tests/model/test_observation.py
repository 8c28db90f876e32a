"""What sparse layers are seen to do is what they do, and watching changes nothing."""

from __future__ import annotations

import pytest
import torch

from page4.kvcache import CacheConfig
from page4.kvcache.decoded import decoded_rows
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment
from page4.model.observation import sparse_calls, sparse_layers
from page4.model.qsa_reference import selected_blocks
from tests.oracle.tiny import random_tokens, tiny_model

LENGTH = 61
TEXT = torch.tensor(random_tokens(LENGTH, seed=5))


@pytest.fixture(scope="module")
def model() -> Qwen4ExpForCausalLM:
    return tiny_model(seed=1)


def batch_of(model: Qwen4ExpForCausalLM, start: int, stop: int) -> RowBatch:
    segment = Segment(0, start, TEXT[start:stop], model.preceding(TEXT, start), decode=False)
    return RowBatch.pack([segment], model.device)


def test_the_calls_of_target_and_draft_are_seen(model: Qwen4ExpForCausalLM) -> None:
    assert list(sparse_layers(model)) == ["2", "3", "draft"]
    cache = model.new_cache(CacheConfig.unquantised(model.dtype, 1, LENGTH))
    cache.reserve(cache.open(), LENGTH)
    batch = batch_of(model, 0, LENGTH)
    with sparse_calls(model) as calls:
        streams = model.forward_rows(batch, cache)
        model.draft_rows(batch, streams, cache)
    assert list(calls) == ["2", "3", "draft"]
    seen = [call.cache for call in calls.values()]
    assert cache.draft is not None
    assert all(a is b for a, b in zip(seen, [*cache.qsa, cache.draft.mixer], strict=True))
    again = model.new_cache(CacheConfig.unquantised(model.dtype, 1, LENGTH))
    again.reserve(again.open(), LENGTH)
    assert torch.equal(model.forward_rows(batch, again), streams)  # unwatched
    call = calls["3"]
    with torch.inference_mode():
        y = call.attention(call.x, call.step, again.qsa[1])
    assert torch.equal(y, call.output)
    assert len(calls) == 3  # nothing is seen after the context has ended


def test_selected_blocks_are_those_that_attention_reads(model: Qwen4ExpForCausalLM) -> None:
    """V of every block that no row selected may hold anything; that of a selected one may not."""
    cache = model.new_cache(CacheConfig.unquantised(model.dtype, 1, LENGTH))
    cache.reserve(cache.open(), LENGTH)
    model.forward_rows(batch_of(model, 0, LENGTH - 1), cache)
    with sparse_calls(model) as calls:
        model.forward_rows(batch_of(model, LENGTH - 1, LENGTH), cache)
    call = calls["3"]
    position = torch.tensor([LENGTH - 1])
    with torch.inference_mode():
        (selected,) = selected_blocks(call.attention, call.x, position, 0, call.cache)
        ratio, topk = call.attention.indexer.ratio, call.attention.indexer.block_topk
        visible = LENGTH // ratio
        assert selected[:visible].sum() == topk < visible and not selected[visible:].any()
        _, v = decoded_rows(call.cache, 0, 0, LENGTH)
        slots = call.cache.pages(torch.tensor([0]), LENGTH).slots(torch.arange(LENGTH)[None])[0]

        def output_with_changed(block: int) -> torch.Tensor:
            tokens = slots[block * ratio : (block + 1) * ratio]
            call.cache.v_pages[tokens // 16, :, tokens % 16] += 3
            y = call.attention(call.x, call.step, call.cache)
            call.cache.v_pages[tokens // 16, :, tokens % 16] = v[block * ratio : (block + 1) * ratio]
            return y

        for block in range(visible):
            same = torch.equal(output_with_changed(block), call.output)
            assert same == (not selected[block])
