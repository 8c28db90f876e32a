"""KV-cache formats: how a key or value component is stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from page4.kernels.codecs import BYTE_FLOATS, INT8_MAX
from page4.kernels.errors import InputError


@dataclass(frozen=True)
class KVFormat:
    """One storage format of the main K/V cache.

    Attributes:
        name: what users write.
        storage: dtype of the pages; byte formats are decoded by bits.
        needs_scale: whether a calibrated FP32 scale per layer belongs to it.
        max_value: largest finite stored magnitude; a scale maps the layer's maximum onto it.
        has_token_scales: whether an FP32 scale per token and KV head, computed as the token is written, is
            stored beside the values. Static scales are refused then.
    """

    name: str
    storage: torch.dtype
    needs_scale: bool
    max_value: float
    has_token_scales: bool = False

    @property
    def bytes_per_value(self) -> int:
        """Stored bytes of one component, without its share of a scale."""
        return self.storage.itemsize

    @property
    def scale_bytes(self) -> int:
        """Stored bytes of scales beside the components of one token and KV head, of K or of V."""
        return torch.float32.itemsize if self.has_token_scales else 0


_FORMATS = {
    f.name: f
    for f in (
        # fp32 is the exact cache of float32 parity checks; fp16 is what studies compare against.
        KVFormat("fp32", torch.float32, needs_scale=False, max_value=torch.finfo(torch.float32).max),
        KVFormat("fp16", torch.float16, needs_scale=False, max_value=torch.finfo(torch.float16).max),
        *(
            KVFormat(name, torch.uint8, needs_scale=True, max_value=spec.max_value)
            for name, spec in BYTE_FLOATS.items()
        ),
        KVFormat("int8", torch.uint8, needs_scale=False, max_value=float(INT8_MAX), has_token_scales=True),
    )
}
FORMAT_NAMES = tuple(_FORMATS)

RECOMMENDED = "e2m5"
"""The 8-bit format that docs/findings.md recommends: on the shipped model it costs no acceptance that could
be seen, takes E4M3's bytes and time, and rounds a third as coarsely. Where K or V have outliers, look at
`page4 quant-error` first. It is the default of `page4 generate` on the shipped checkpoint, and what is taken
of several overlays when no format is named."""


def get_format(name: str) -> KVFormat:
    """The format called ``name``.

    Raises:
        InputError: no such format; the message lists those there are.
    """
    if name not in _FORMATS:
        raise InputError(f"KV format {name!r} is unknown, expected one of {', '.join(FORMAT_NAMES)}")
    return _FORMATS[name]
