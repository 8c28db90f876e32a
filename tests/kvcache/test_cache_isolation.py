"""Requests see what they wrote and nothing else: poison, reuse, placement, neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from page4.kvcache import FORMAT_NAMES, HybridCache
from page4.model import Qwen4ExpForCausalLM
from tests.kvcache.scenario import TOKENS, config, play, qsa_caches, rows_of
from tests.oracle.steps import Stepper


def poison(cache: HybridCache) -> None:
    """NaN in everything a new request has not written: pages, index keys, and states of earlier requests."""
    for layer in qsa_caches(cache):
        for pages in (layer.k_pages, layer.v_pages):
            pages.fill_(0xFF if pages.dtype == torch.uint8 else math.nan)
        for scales in (layer.k_token_scales, layer.v_token_scales):
            if scales is not None:
                scales.fill_(math.nan)
        layer.compressed_pages.fill_(math.nan)
        layer.ring.fill_(math.nan)
    for slots in cache.recurrent:
        slots.state.fill_(math.nan)


@pytest.mark.parametrize("kv_format", FORMAT_NAMES)
def test_poisoned_storage_changes_nothing(model: Qwen4ExpForCausalLM, kv_format: str) -> None:
    poisoned = model.new_cache(config(kv_format))
    poison(poisoned)
    clean = play(model, model.new_cache(config(kv_format)))
    for a, b in zip(play(model, poisoned), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kv_format", FORMAT_NAMES)
def test_a_request_after_others_equals_one_in_a_fresh_cache(
    model: Qwen4ExpForCausalLM, kv_format: str
) -> None:
    cache = model.new_cache(config(kv_format))
    first = play(model, cache)
    cache.close(0)
    again = play(model, cache)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_physical_pages_do_not_matter(model: Qwen4ExpForCausalLM, kv_format: str) -> None:
    """Pages in any order, scattered among another request's, give bit-equal results."""
    scattered = model.new_cache(config(kv_format))
    other = scattered.open()
    stepper = Stepper(model, scattered)
    plain = Stepper(model, model.new_cache(config(kv_format)))
    for i in range(4):
        scattered.reserve(other, 16 * (i + 1))
        rows = TOKENS[16 * i : 16 * (i + 1)]
        assert torch.equal(stepper.prefill(rows), plain.prefill(rows))
    tables = [c.tables.pages(s.request) for c, s in ((scattered, stepper), (plain.cache, plain))]
    assert tables[0] != tables[1]
    scattered.tables.check()


@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_requests_do_not_write_into_each_other(model: Qwen4ExpForCausalLM, kv_format: str) -> None:
    cache = model.new_cache(config(kv_format))
    quiet = Stepper(model, cache)
    quiet.prefill(TOKENS[:37])

    def held() -> list[Tensor]:
        stored = (
            x
            for layer in cache.qsa
            for x in (layer.k_pages, layer.v_pages, layer.k_token_scales, layer.v_token_scales)
        )
        pages = [rows_of(x, quiet, 37) for x in stored if x is not None]
        return [*pages, *(layer.ring[quiet.request].clone() for layer in cache.qsa)]

    before = held() + cache.snapshot([quiet.request])
    play(model, cache)
    for a, b in zip(before, held() + cache.snapshot([quiet.request]), strict=True):
        assert torch.equal(a, b)
