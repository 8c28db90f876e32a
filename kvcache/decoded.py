"""K and V of a request as their readers see them, whatever the format that they are stored in."""

from __future__ import annotations

import torch
from torch import Tensor

from page4.kernels.codecs import decode_kv

from .cache import QSALayerCache
from .pages import PAGE_TOKENS


def decoded_rows(layer: QSALayerCache, request: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """K and V of a request's tokens ``first .. stop - 1``, FP32 ``[stop - first, Hkv, D]`` each.

    Scales are applied: static ones per layer, or those of every token and KV head.
    """
    device = layer.k_pages.device
    pages = layer.pages(torch.tensor([request], device=device), stop)
    slots = pages.slots(torch.arange(first, stop, device=device)[None])[0]
    page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS

    def decoded(stored: Tensor, scale: float, token_scales: Tensor | None) -> Tensor:
        values = decode_kv(stored[page, :, offset], layer.format.name)
        return values * (scale if token_scales is None else token_scales[page, :, offset].unsqueeze(-1))

    return (
        decoded(layer.k_pages, layer.k_scale, layer.k_token_scales),
        decoded(layer.v_pages, layer.v_scale, layer.v_token_scales),
    )
