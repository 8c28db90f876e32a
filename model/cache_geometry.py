"""What the cache has to know of a model."""

from __future__ import annotations

from page4.kvcache.cache import CacheGeometry

from .config import Qwen4ExpConfig


def cache_geometry(config: Qwen4ExpConfig) -> CacheGeometry:
    """The geometry of a model's caches."""
    return CacheGeometry(
        layer_types=config.layer_types,
        ple_layers=tuple(i - 1 for i in config.ple_layer_ids),
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        index_dim=config.indexer_head_dim,
        compress_ratio=config.indexer_compress_ratio,
        delta_heads=config.linear_num_value_heads,
        delta_key_dim=config.linear_key_head_dim,
        delta_value_dim=config.linear_value_head_dim,
        conv_channels=2 * config.linear_num_key_heads * config.linear_key_head_dim
        + config.linear_num_value_heads * config.linear_value_head_dim,
        conv_length=config.linear_conv_kernel_dim - 1,
        ple_channels=config.stream_size,
        ple_length=(config.ple_conv_kernel_size - 1) * config.ngram_size,
        has_draft=config.mtp_num_hidden_layers > 0,
    )
