"""KV cache: formats, pages and block tables, index keys, recurrent slots, scales, prefix reuse."""

from .cache import CacheConfig, CacheGeometry, HybridCache
from .formats import FORMAT_NAMES, RECOMMENDED, KVFormat, get_format
from .layer_formats import LayerFormats
from .scales import KVScales, ScalePair, scale_for_maximum

__all__ = [
    "FORMAT_NAMES",
    "RECOMMENDED",
    "CacheConfig",
    "CacheGeometry",
    "HybridCache",
    "KVFormat",
    "KVScales",
    "LayerFormats",
    "ScalePair",
    "get_format",
    "scale_for_maximum",
]
