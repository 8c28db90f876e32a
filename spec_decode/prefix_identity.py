"""What the bytes of a cached prefix depend on beside its tokens."""

from __future__ import annotations

import dataclasses
import hashlib

import torch

from page4.kvcache import CacheConfig
from page4.model import Qwen4ExpForCausalLM
from page4.model.cache_geometry import cache_geometry

_CAPACITY = ("max_requests", "max_tokens", "max_request_tokens")


def prefix_identity(model: Qwen4ExpForCausalLM, cache: CacheConfig, prefill_chunk: int) -> dict[str, str]:
    """Names and values of everything that must be equal for a prefix to be reused.

    The weights are not among them: whoever keeps prefixes in files names them
    (:attr:`page4.kvcache.prefix_cache.PrefixConfig.model`). How many requests and tokens a cache has room for
    makes no difference.
    """
    device = model.device
    choices = {f.name: getattr(cache, f.name) for f in dataclasses.fields(cache) if f.name not in _CAPACITY}
    return {
        "geometry": repr(cache_geometry(model.config)),
        **{name: str(value) for name, value in choices.items()},
        "scales": hashlib.sha256(repr(cache.scales).encode()).hexdigest()[:16],
        "prefill_chunk": str(prefill_chunk),
        "activations": str(model.dtype),
        "backend": model.backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
    }
