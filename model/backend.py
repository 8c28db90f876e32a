"""Which backend runs a model, asked before anything is launched."""

from __future__ import annotations

import torch

from page4.kernels.backend import Backend, resolve_backend
from page4.kernels.errors import InputError

from .config import Qwen4ExpConfig


def checked_backend(name: str, config: Qwen4ExpConfig, dtype: torch.dtype, device_type: str) -> Backend:
    """The backend called ``name``, if it runs a model of this configuration and dtype on this type of device.

    Raises:
        InputError: no such backend, or it cannot run on the device, or has no kernels for the model's sizes.
    """
    backend = resolve_backend(name, device_type)
    if backend == "triton":
        _check_triton(config, dtype)
    return backend


def _check_triton(config: Qwen4ExpConfig, dtype: torch.dtype) -> None:
    """Refuse sizes that the Triton kernels of the sparse layers are not made for; the first one is named."""
    # Triton does not exist on every platform that runs the reference.
    from page4.kernels.block_plan import BLOCK_TOKENS
    from page4.kernels.block_select_triton import MAX_TOPK
    from page4.kernels.page4_attention_inputs import HEAD_DIMS, MAX_HEADS_PER_KV

    c = config
    heads_per_kv = c.num_attention_heads // c.num_key_value_heads
    limits: tuple[tuple[bool, str, object, str], ...] = (
        (
            c.indexer_compress_ratio == BLOCK_TOKENS,
            "indexer_compress_ratio",
            c.indexer_compress_ratio,
            str(BLOCK_TOKENS),
        ),
        (c.head_dim in HEAD_DIMS, "head_dim", c.head_dim, f"one of {', '.join(map(str, HEAD_DIMS))}"),
        (
            _is_power_of_two(c.indexer_head_dim),
            "indexer_head_dim",
            c.indexer_head_dim,
            "a power of two",
        ),
        (
            _is_power_of_two(c.rotary_dim) and 2 <= c.rotary_dim <= min(c.head_dim, c.indexer_head_dim),
            "rotary dimension",
            c.rotary_dim,
            "a power of two from 2 to head_dim and indexer_head_dim",
        ),
        (
            heads_per_kv <= MAX_HEADS_PER_KV,
            "number of query heads per KV head",
            heads_per_kv,
            f"at most {MAX_HEADS_PER_KV}",
        ),
        (
            c.block_topk <= MAX_TOPK,
            "indexer_budget / indexer_compress_ratio",
            c.block_topk,
            f"at most {MAX_TOPK}",
        ),
        (dtype in (torch.float16, torch.float32), "dtype", dtype, "torch.float16 or torch.float32"),
    )
    for holds, name, value, expected in limits:
        if not holds:
            raise InputError(f"backend 'triton' needs {name} {expected}, the model has {value}")


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
