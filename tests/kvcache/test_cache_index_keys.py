"""Raw index keys and compressed blocks under speculation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from page4.kvcache.cache import QSALayerCache
from page4.model import Qwen4ExpForCausalLM
from tests.kvcache.scenario import TOKENS, config, qsa_caches
from tests.oracle.steps import Stepper, exact_cache


@pytest.mark.parametrize("num_draft_tokens", range(8))
def test_the_ring_holds_an_open_block_and_all_verify_rows(
    model: Qwen4ExpForCausalLM, num_draft_tokens: int
) -> None:
    ratio = model.config.indexer_compress_ratio
    capacity = exact_cache(model, num_draft_tokens).qsa[0].ring.shape[1]
    assert capacity % ratio == 0
    assert ratio + num_draft_tokens <= capacity < 2 * ratio + num_draft_tokens


@pytest.mark.parametrize("prompt_length", [16, 17, 18, 19])
@pytest.mark.parametrize("num_draft_tokens", range(1, 8))
def test_rejected_rows_never_overwrite_committed_raw_keys(
    model: Qwen4ExpForCausalLM, num_draft_tokens: int, prompt_length: int
) -> None:
    """Every offset of the open block, every K, everything rejected: the block's mean must not notice."""
    speculative = Stepper(model, exact_cache(model, num_draft_tokens))
    sequential = Stepper(model)
    for stepper in (speculative, sequential):
        stepper.prefill(TOKENS[:prompt_length])
    for position in range(prompt_length, prompt_length + 6):
        token = TOKENS[position]
        streams = speculative.decode([token] + [3] * num_draft_tokens, keep=1)[:1]
        assert (streams - sequential.decode([token])).abs().max() <= 1e-4
        length = position + 1
        for ours, theirs in zip(speculative.cache.qsa, sequential.cache.qsa, strict=True):
            open_block = torch.arange(length - length % 4, length)
            kept, expected = (c.ring[0, open_block % c.ring.shape[1]] for c in (ours, theirs))
            assert torch.allclose(kept, expected, atol=1e-5)
            assert torch.allclose(complete_blocks(ours, length), complete_blocks(theirs, length), atol=1e-5)


def complete_blocks(layer: QSALayerCache, length: int) -> Tensor:
    """Compressed keys of request 0's complete blocks, in block order."""
    return layer.compressed_pages[layer.pages(torch.tensor([0]), length).tables[0]].flatten(0, 1)[
        : length // 4
    ]


def test_index_keys_are_never_quantised(model: Qwen4ExpForCausalLM) -> None:
    for kv_format in ("fp16", "e4m3"):
        for layer in qsa_caches(model.new_cache(config(kv_format))):
            assert layer.ring.dtype == layer.compressed_pages.dtype == torch.float16
