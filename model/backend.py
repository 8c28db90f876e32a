"""Which backend runs a model, asked before anything is launched."""

from __future__ import annotations

import torch

from page4.kernels.backend import Backend, resolve_backend
from page4.kernels.errors import InputError

from .config import Qwen4ExpConfig


def checked_backend(
    name: str | None, config: Qwen4ExpConfig, dtype: torch.dtype, device_type: str
) -> Backend:
    """The backend called ``name``, if it runs a model of this configuration and dtype on this type of device.

    None is ``triton`` on CUDA if its kernels take the model's sizes, and ``reference`` otherwise. A GPU on
    which they cannot run, or multiply wrongly, is an error all the same.

    Raises:
        InputError: no such backend, or it cannot run on the device, or has no kernels for the model's sizes.
    """
    backend = resolve_backend(name or ("triton" if device_type == "cuda" else "reference"), device_type)
    if backend == "triton":
        try:
            _check_triton(config, dtype)
        except InputError:
            if name is not None:
                raise
            return "reference"
    return backend


def _check_triton(config: Qwen4ExpConfig, dtype: torch.dtype) -> None:
    """Refuse sizes that the Triton kernels are not made for; the first one is named."""
    # Triton does not exist on every platform that runs the reference.
    from page4.kernels.block_plan import BLOCK_TOKENS
    from page4.kernels.block_select_triton import MAX_TOPK
    from page4.kernels.gated_delta_triton import HEAD_DIMS as DELTA_DIMS
    from page4.kernels.gated_delta_triton import MAX_TAPS
    from page4.kernels.page4_attention_inputs import HEAD_DIMS, MAX_HEADS_PER_KV

    ratio, topk, dtypes = config.indexer_compress_ratio, config.block_topk, (torch.float16, torch.float32)
    head, index, rotary = config.head_dim, config.indexer_head_dim, config.rotary_dim
    group = config.num_attention_heads // config.num_key_value_heads
    linear = "linear_attention" in config.layer_types
    key, value, taps = (
        config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim,
    )  # fmt: skip
    heads, delta = (", ".join(map(str, dims)) for dims in (HEAD_DIMS, DELTA_DIMS))
    limits: tuple[tuple[bool, str, object], ...] = (
        (ratio == BLOCK_TOKENS, f"indexer_compress_ratio {BLOCK_TOKENS}", ratio),
        (head in HEAD_DIMS, f"head_dim one of {heads}", head),
        (_is_power_of_two(index), "indexer_head_dim a power of two", index),
        (_is_power_of_two(rotary) and 2 <= rotary <= head, "rotary dimension a power of two", rotary),
        (group <= MAX_HEADS_PER_KV, f"query heads per KV head at most {MAX_HEADS_PER_KV}", group),
        (topk <= MAX_TOPK, f"indexer_budget / indexer_compress_ratio at most {MAX_TOPK}", topk),
        (not linear or key in DELTA_DIMS, f"linear_key_head_dim one of {delta}", key),
        (not linear or value in DELTA_DIMS, f"linear_value_head_dim one of {delta}", value),
        (not linear or taps <= MAX_TAPS, f"linear_conv_kernel_dim at most {MAX_TAPS}", taps),
        (dtype in dtypes, "dtype torch.float16 or torch.float32", dtype),
    )
    for holds, limit, found in limits:
        if not holds:
            raise InputError(f"backend 'triton' needs {limit}, the model has {found}")


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
