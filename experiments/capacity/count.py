"""The rows of the study: bytes and capacities of every degree, pair of formats, context and concurrency."""

from __future__ import annotations

from typing import Any

import torch

from page4.experiments.capacity.config import CapacityConfig
from page4.kvcache import CacheConfig
from page4.kvcache.cache import CacheGeometry
from page4.kvcache.capacity import (
    cache_bytes,
    page_bytes,
    rank_geometry,
    requests_within,
    state_bytes,
    tokens_within,
)
from page4.kvcache.pages import PAGE_TOKENS, pages_for

DTYPE = torch.float16
"""Of the activations, which convolutions keep."""

COLUMNS = (
    "tensor_parallel",
    "kv_format",
    "draft_kv_format",
    "context",
    "concurrency",
    "bytes_per_token",
    "state_bytes",
    "request_bytes",
    "cache_bytes",
    "kv_bytes",
    "draft_kv_bytes",
    "compressed_key_bytes",
    "raw_key_bytes",
    "delta_state_bytes",
    "conv_input_bytes",
    "ple_input_bytes",
    "block_table_bytes",
    "fits",
    "max_tokens",
    "max_requests",
)


def count(config: CapacityConfig, geometry: CacheGeometry) -> list[dict[str, Any]]:
    """A row for every combination; all bytes are those of one rank.

    ``bytes_per_token`` are those of pages, ``state_bytes`` what a request takes whatever its length,
    ``request_bytes`` what one request of ``context`` tokens needs. ``cache_bytes`` and the kinds after it are
    of a whole cache for ``concurrency`` such requests; ``max_tokens`` fit into the budget with so many
    requests open, and ``max_requests`` of this context.
    """
    return [
        _row(config, rank_geometry(geometry, degree), degree, pair, context, requests)
        for degree in config.tensor_parallel
        for pair in config.formats
        for context in config.contexts
        for requests in config.concurrency
    ]


def _row(
    config: CapacityConfig,
    rank: CacheGeometry,
    degree: int,
    formats: tuple[str, str],
    context: int,
    requests: int,
) -> dict[str, Any]:
    cache = CacheConfig(
        kv_format=formats[0],
        draft_kv_format=formats[1],
        num_draft_tokens=config.num_draft_tokens,
        max_requests=requests,
        max_tokens=requests * context,
        max_request_tokens=context,
    )
    page, state = page_bytes(rank, cache).total, state_bytes(rank, cache, DTYPE).total
    found = cache_bytes(rank, cache, DTYPE)
    return {
        "tensor_parallel": degree,
        "kv_format": formats[0],
        "draft_kv_format": formats[1],
        "context": context,
        "concurrency": requests,
        "bytes_per_token": page / PAGE_TOKENS,
        "state_bytes": state,
        "request_bytes": pages_for(context) * page + state,
        "cache_bytes": found.total,
        "kv_bytes": found.kv,
        "draft_kv_bytes": found.draft_kv,
        "compressed_key_bytes": found.compressed_keys,
        "raw_key_bytes": found.raw_keys,
        "delta_state_bytes": found.delta_state,
        "conv_input_bytes": found.conv_inputs,
        "ple_input_bytes": found.ple_inputs,
        "block_table_bytes": found.block_tables,
        "fits": found.total <= config.budget,
        "max_tokens": tokens_within(config.budget, rank, cache, DTYPE),
        "max_requests": requests_within(config.budget, context, rank, cache, DTYPE),
    }
