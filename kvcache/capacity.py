"""How many bytes a cache takes, and what fits into so many, without allocating anything.

The figures are those of :class:`page4.kvcache.cache.HybridCache`, to the byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from page4.kernels.errors import InputError

from .cache import CacheConfig, CacheGeometry
from .formats import KVFormat
from .layer_formats import LayerFormats, draft_format
from .pages import PAGE_TOKENS, pages_for

_TABLE_ENTRY = torch.int64.itemsize
_FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache by what they hold.

    Attributes:
        kv: K and V of the target's QSA layers, scales per token included.
        draft_kv: K and V of the MTP layer.
        compressed_keys: index keys of complete blocks, of target and draft.
        raw_keys: rings of raw index keys.
        delta_state: matrices of the delta rule, K + 1 a request.
        conv_inputs: inputs of the delta layers' convolutions.
        ple_inputs: inputs of PLE's convolutions.
        block_tables: page ids.
    """

    kv: int = 0
    draft_kv: int = 0
    compressed_keys: int = 0
    raw_keys: int = 0
    delta_state: int = 0
    conv_inputs: int = 0
    ple_inputs: int = 0
    block_tables: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


def cache_bytes(geometry: CacheGeometry, config: CacheConfig, activation_dtype: torch.dtype) -> CacheBytes:
    """Bytes that a cache of this geometry and configuration allocates.

    Pages hold ``max_tokens`` and one page more for each request, which may end in a part of one. Recurrent
    state has one request more than ``max_requests``: padding points there.

    Raises:
        InputError: unknown format, or one for a layer that has no K/V.
    """
    requests = config.max_requests
    pages = pages_for(config.max_tokens) + requests
    width = pages if config.max_request_tokens is None else min(pages, pages_for(config.max_request_tokens))
    page = page_bytes(geometry, config)
    state = state_bytes(geometry, config, activation_dtype)
    return CacheBytes(
        kv=pages * page.kv,
        draft_kv=pages * page.draft_kv,
        compressed_keys=pages * page.compressed_keys,
        raw_keys=requests * state.raw_keys,
        delta_state=(requests + 1) * state.delta_state,
        conv_inputs=(requests + 1) * state.conv_inputs,
        ple_inputs=(requests + 1) * state.ple_inputs,
        block_tables=requests * width * _TABLE_ENTRY,
    )


def page_bytes(geometry: CacheGeometry, config: CacheConfig) -> CacheBytes:
    """Bytes of a page of 16 tokens, in all layers.

    Raises:
        InputError: unknown format, or one for a layer that has no K/V.
    """
    chosen = LayerFormats(config.kv_format)
    draft = draft_format(chosen, config.draft_kv_format)
    targets, drafts = _sparse_layers(geometry)
    keys = PAGE_TOKENS // geometry.compress_ratio * geometry.index_dim * config.index_dtype.itemsize
    return CacheBytes(
        kv=sum(_kv_page(geometry, used) for used in chosen.of(geometry.qsa_layers)),
        draft_kv=drafts * _kv_page(geometry, draft),
        compressed_keys=(targets + drafts) * keys,
    )


def state_bytes(geometry: CacheGeometry, config: CacheConfig, activation_dtype: torch.dtype) -> CacheBytes:
    """Bytes that a request takes whatever its length: recurrent state for K + 1 rows, and raw index keys."""
    rows, ratio = config.num_draft_tokens + 1, geometry.compress_ratio
    ring = ratio * -(-(ratio + config.num_draft_tokens) // ratio)
    delta_layers = geometry.layer_types.count("linear_attention")
    matrices = geometry.delta_heads * geometry.delta_key_dim * geometry.delta_value_dim
    conv = (geometry.conv_length + rows) * geometry.conv_channels
    ple = (geometry.ple_length + rows) * geometry.ple_channels
    return CacheBytes(
        raw_keys=sum(_sparse_layers(geometry)) * ring * geometry.index_dim * config.index_dtype.itemsize,
        delta_state=delta_layers * rows * matrices * _FP32,
        conv_inputs=delta_layers * conv * activation_dtype.itemsize,
        ple_inputs=len(geometry.ple_layers) * ple * _FP32,
    )


def snapshot_bytes(geometry: CacheGeometry, config: CacheConfig, activation_dtype: torch.dtype) -> CacheBytes:
    """Bytes that a prefix needs beside its pages: one state of the delta rule, not K + 1."""
    state = state_bytes(geometry, config, activation_dtype)
    return replace(state, delta_state=state.delta_state // (config.num_draft_tokens + 1))


def tokens_within(
    budget: int, geometry: CacheGeometry, config: CacheConfig, activation_dtype: torch.dtype
) -> int:
    """The largest ``max_tokens``, in whole pages, of a cache within ``budget`` bytes; 0 if there is none.

    All else is as ``config`` says, ``max_requests`` above all.
    """

    def fits(pages: int) -> bool:
        sized = replace(config, max_tokens=pages * PAGE_TOKENS)
        return cache_bytes(geometry, sized, activation_dtype).total <= budget

    return _largest(fits) * PAGE_TOKENS


def requests_within(
    budget: int, tokens: int, geometry: CacheGeometry, config: CacheConfig, activation_dtype: torch.dtype
) -> int:
    """How many requests of ``tokens`` each a cache within ``budget`` bytes has room for at once."""

    def fits(requests: int) -> bool:
        sized = replace(
            config, max_requests=requests, max_tokens=requests * tokens, max_request_tokens=tokens
        )
        return cache_bytes(geometry, sized, activation_dtype).total <= budget

    return _largest(fits)


def rank_geometry(geometry: CacheGeometry, degree: int) -> CacheGeometry:
    """What one of ``degree`` tensor-parallel ranks keeps: its share of the heads.

    KV heads that are fewer than ranks are kept by several. Index keys, which all heads share, and PLE's
    streams are kept by every rank.

    Raises:
        InputError: the heads cannot be shared out evenly.
    """
    if degree < 1:
        raise InputError(f"the tensor-parallel degree is {degree}, expected at least 1")
    heads = geometry.kv_heads
    if heads % degree and degree % heads:
        raise InputError(f"{heads} KV heads cannot be shared by {degree} ranks")
    if geometry.delta_heads % degree or geometry.conv_channels % degree:
        raise InputError(
            f"{geometry.delta_heads} delta heads and {geometry.conv_channels} channels cannot be shared by "
            f"{degree} ranks"
        )
    return replace(
        geometry,
        kv_heads=max(1, heads // degree),
        delta_heads=geometry.delta_heads // degree,
        conv_channels=geometry.conv_channels // degree,
    )


def _sparse_layers(geometry: CacheGeometry) -> tuple[int, int]:
    """QSA layers of the target and of the draft."""
    return len(geometry.qsa_layers), int(geometry.has_draft)


def _kv_page(geometry: CacheGeometry, kv_format: KVFormat) -> int:
    head = geometry.head_dim * kv_format.bytes_per_value + kv_format.scale_bytes
    return 2 * PAGE_TOKENS * geometry.kv_heads * head


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 if not even 1 does; what fits a number fits every smaller one."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
