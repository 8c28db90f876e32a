"""What the bytes of a cached prefix depend on beside its tokens."""

from __future__ import annotations

import dataclasses

import torch

from page4.kvcache import CacheConfig
from page4.model import Qwen4ExpForCausalLM
from page4.model.cache_geometry import cache_geometry


def prefix_identity(model: Qwen4ExpForCausalLM, cache: CacheConfig, prefill_chunk: int) -> dict[str, str]:
    """Names and values of everything that must be equal for a prefix to be reused.

    The weights are not among them: whoever keeps prefixes in files names them
    (:attr:`page4.kvcache.prefix_cache.PrefixConfig.model`). How many requests and tokens a cache has room for
    makes no difference.
    """
    device = model.device
    sized = dataclasses.replace(cache, max_requests=1, max_tokens=1, max_request_tokens=None)
    return {
        "geometry": repr(cache_geometry(model.config)),
        "cache": repr(sized),
        "prefill_chunk": str(prefill_chunk),
        "activations": str(model.dtype),
        "backend": model.backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
    }
