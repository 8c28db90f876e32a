"""Capacity: the figures are those of the tensors that a cache really holds, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from page4.kernels.errors import InputError
from page4.kvcache import (
    FORMAT_NAMES,
    CacheConfig,
    CacheGeometry,
    HybridCache,
    KVScales,
    LayerFormats,
    ScalePair,
)
from page4.kvcache.capacity import (
    cache_bytes,
    page_bytes,
    rank_geometry,
    requests_within,
    snapshot_bytes,
    state_bytes,
    tokens_within,
)
from page4.kvcache.group_layout import GroupLayout
from page4.kvcache.layer_formats import draft_format

BASE = CacheGeometry(
    layer_types=("linear_attention", "qsa_attention") * 2 + ("linear_attention",),
    ple_layers=(0,),
    kv_heads=2,
    head_dim=32,
    index_dim=16,
    compress_ratio=4,
    delta_heads=4,
    delta_key_dim=8,
    delta_value_dim=12,
    conv_channels=80,
    conv_length=3,
    ple_channels=48,
    ple_length=9,
    has_draft=True,
)
GEOMETRIES = {
    "base": BASE,
    "no draft": replace(BASE, has_draft=False),
    "no PLE": replace(BASE, ple_layers=()),
    "two PLE layers, ratio 8": replace(BASE, ple_layers=(0, 2), compress_ratio=8),
    "QSA alone": replace(BASE, layer_types=("qsa_attention",) * 3, ple_layers=()),
    "one KV head of 128": replace(BASE, kv_heads=1, head_dim=128, index_dim=48),
}


def allocated(cache: HybridCache) -> int:
    """Bytes of every tensor that can be reached from the cache, each storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[Any] = [cache]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
        elif isinstance(item, list | tuple | set):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
        elif hasattr(item, "__dict__"):
            waiting += vars(item).values()
    return sum(storages.values())


def config(geometry: CacheGeometry, kv_format: str, draft: str | None, **sizes: Any) -> CacheConfig:
    """A configuration with the scales that its formats need."""
    layers = geometry.layer_types.count("qsa_attention")
    pairs = (ScalePair(0.5, 0.5),) * layers
    target = LayerFormats(kv_format)
    scales = KVScales(
        target=pairs if any(used.needs_scale for used in target.of(geometry.qsa_layers)) else (),
        draft=pairs[0] if draft_format(target, draft).needs_scale else None,
    )
    return CacheConfig(kv_format=kv_format, draft_kv_format=draft, scales=scales, **sizes)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize(
    ("kv_format", "draft"), [*((f, None) for f in FORMAT_NAMES), ("e4m3", "fp16"), ("fp16", "int8")]
)
@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_the_allocated_tensors_agree_to_the_byte(
    name: str, kv_format: str, draft: str | None, drafts: int
) -> None:
    geometry = GEOMETRIES[name]
    sizes = {"num_draft_tokens": drafts, "max_requests": 3, "max_tokens": 100, "max_request_tokens": 50}
    chosen = config(geometry, kv_format, draft, **sizes)
    cache = HybridCache(geometry, chosen, torch.float16, torch.device("cpu"))
    assert cache_bytes(geometry, chosen, torch.float16).total == allocated(cache)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "int8"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_pages_and_snapshots_agree_with_what_is_kept_of_a_prefix(
    name: str, kv_format: str, drafts: int
) -> None:
    geometry = GEOMETRIES[name]
    chosen = config(geometry, kv_format, None, num_draft_tokens=drafts, max_requests=2, max_tokens=100)
    cache = HybridCache(geometry, chosen, torch.float16, torch.device("cpu"))
    pages = sum(stored[0].nbytes for stored in cache.paged_tensors())
    assert page_bytes(geometry, chosen).total == pages
    snapshot = sum(state.nbytes for state in cache.prefilled_state(0))
    assert snapshot_bytes(geometry, chosen, torch.float16).total == snapshot
    parts = len(cache.paged_tensors()) + len(cache.prefilled_state(0))
    group = GroupLayout(cache, 4).nbytes
    assert 4 * pages + snapshot <= group < 4 * pages + snapshot + 16 * parts, "but for alignment"


@pytest.mark.parametrize("kv_format", ["e4m3,1:fp16", "fp16,3:int8", "int8,1:e4m3,3:fp32"])
def test_layers_of_different_formats_agree_to_the_byte(kv_format: str) -> None:
    """And a layer's exception costs what the layer would cost in a cache of that format alone."""
    sizes = {"max_requests": 2, "max_tokens": 100}
    chosen = config(BASE, kv_format, None, **sizes)
    counted = cache_bytes(BASE, chosen, torch.float16)
    cache = HybridCache(BASE, chosen, torch.float16, torch.device("cpu"))
    assert counted.total == allocated(cache)
    alone = [
        cache_bytes(BASE, config(BASE, used.name, None, **sizes), torch.float16).kv
        for used in LayerFormats(kv_format).of(BASE.qsa_layers)
    ]
    assert 2 * counted.kv == sum(alone)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.integers(1, 5),
    tokens=st.integers(1, 300),
    most=st.none() | st.integers(1, 400),
    drafts=st.integers(0, 8),
    kv_format=st.sampled_from(FORMAT_NAMES),
    index_dtype=st.sampled_from([torch.float16, torch.float32]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
)
def test_any_size(
    requests: int,
    tokens: int,
    most: int | None,
    drafts: int,
    kv_format: str,
    index_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    chosen = config(
        BASE,
        kv_format,
        None,
        max_requests=requests,
        max_tokens=tokens,
        max_request_tokens=most,
        num_draft_tokens=drafts,
        index_dtype=index_dtype,
    )
    cache = HybridCache(BASE, chosen, dtype, torch.device("cpu"))
    assert cache_bytes(BASE, chosen, dtype).total == allocated(cache)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_kind_is_that_of_its_tensors(name: str) -> None:
    geometry = GEOMETRIES[name]
    chosen = config(geometry, "int8", "fp16", num_draft_tokens=3, max_requests=2, max_tokens=64)
    cache = HybridCache(geometry, chosen, torch.float16, torch.device("cpu"))
    found = cache_bytes(geometry, chosen, torch.float16)
    tokens = cache.tables.pool.total * 16
    sparse = [*cache.qsa, *([cache.draft.mixer] if cache.draft else [])]
    assert found.kv == sum(layer.kv_bytes_per_token * tokens for layer in cache.qsa)
    assert found.draft_kv == sum(layer.kv_bytes_per_token * tokens for layer in sparse[len(cache.qsa) :])
    assert found.compressed_keys == sum(layer.compressed_pages.nbytes for layer in sparse)
    assert found.raw_keys == sum(layer.ring.nbytes for layer in sparse)
    delta = [layer.mixer for layer in cache.layers if layer.mixer not in cache.qsa]
    assert found.delta_state == sum(slots.state.nbytes for slots in delta)
    assert found.conv_inputs == sum(slots.conv.state.nbytes for slots in delta)
    assert found.ple_inputs == sum(layer.ple.state.nbytes for layer in cache.layers if layer.ple)
    assert found.block_tables == cache.tables.tensor.nbytes


def test_more_requests_and_more_tokens_cost_what_a_request_and_a_page_take() -> None:
    def total(requests: int, tokens: int) -> int:
        sizes = {"max_requests": requests, "max_tokens": tokens, "max_request_tokens": 64}
        return cache_bytes(BASE, CacheConfig(**sizes), torch.float16).total

    page, state = page_bytes(BASE, CacheConfig()).total, state_bytes(BASE, CacheConfig(), torch.float16).total
    assert total(2, 1040) - total(2, 1024) == page
    assert total(3, 1024) - total(2, 1024) == state + page + 4 * 8  # its last page, and its table


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("most", [None, 10_000])
def test_what_fits_fits_and_one_page_more_does_not(requests: int, most: int | None) -> None:
    base = CacheConfig(max_requests=requests, max_request_tokens=most)
    budget = 3_000_000
    tokens = tokens_within(budget, BASE, base, torch.float16)
    assert tokens > 0 and tokens % 16 == 0
    for more, inside in ((0, True), (16, False)):
        sized = replace(base, max_tokens=tokens + more)
        assert (cache_bytes(BASE, sized, torch.float16).total <= budget) == inside


def test_nothing_fits_into_nothing() -> None:
    assert tokens_within(1000, BASE, CacheConfig(), torch.float16) == 0
    assert requests_within(1000, 16, BASE, CacheConfig(), torch.float16) == 0


def test_requests_that_fit() -> None:
    budget, tokens = 5_000_000, 1000
    found = requests_within(budget, tokens, BASE, CacheConfig(), torch.float16)
    assert found > 1
    for requests, inside in ((found, True), (found + 1, False)):
        sized = CacheConfig(max_requests=requests, max_tokens=requests * tokens, max_request_tokens=tokens)
        assert (cache_bytes(BASE, sized, torch.float16).total <= budget) == inside


def test_ranks_share_heads_and_keep_index_keys() -> None:
    two, four = rank_geometry(BASE, 2), rank_geometry(BASE, 4)
    assert (two.kv_heads, two.delta_heads, two.conv_channels) == (1, 2, 40)
    assert (four.kv_heads, four.delta_heads, four.conv_channels) == (1, 1, 20)
    assert (four.index_dim, four.ple_channels, four.layer_types) == (16, 48, BASE.layer_types)
    assert rank_geometry(BASE, 1) == BASE


@pytest.mark.parametrize(
    ("degree", "message"),
    [(0, "degree is 0"), (3, "2 KV heads cannot be shared by 3 ranks"), (8, "4 delta heads and 80 channels")],
)
def test_ranks_that_cannot_share(degree: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rank_geometry(BASE, degree)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError, match="KV format 'fp7' is unknown"):
        cache_bytes(BASE, CacheConfig(kv_format="fp7"), torch.float16)
