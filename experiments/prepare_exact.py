"""What a step's preparation must write, by float64, and how far from that its roundings may lead.

The rule: a number is right if its distance to the exact result is at most the sum of what each rounding of
the definition can add. Those are FP32 arithmetic, with sums in any order; half a step of the activations'
dtype after the norm and another after the rotation; and half a step of the format that stores it. Steps are
those at the largest value that the number can have by then: they do not shrink below the smallest normal.

V and raw index keys are copied, not computed, so they must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.experiments.kernel_cases import PrepareInputs
from page4.kernels.codecs import (
    BYTE_FLOATS,
    INT8_MAX,
    STORAGE_DTYPES,
    decode_kv,
    encode_int8_rows,
    encode_kv,
)
from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred
from page4.kernels.qsa_prepare import PAGE_TOKENS

EPS = 1e-6  # of the norms
FP32_ROUNDING = 2.0**-24  # relative to the rounded number
_TINY = torch.finfo(torch.float32).tiny  # keeps a bound from being 0; also the least scale of int8
_EXPONENT_BITS = 0x7FF0000000000000  # of float64


@dataclass(frozen=True)
class Grid:
    """Numbers of a floating-point format.

    Attributes:
        eps: their distance from 1 to 2.
        smallest_normal: numbers below are as far apart as those just above.
        largest: number.
    """

    eps: float
    smallest_normal: float
    largest: float

    @classmethod
    def of_dtype(cls, dtype: torch.dtype) -> Grid:
        """Grid of a PyTorch dtype."""
        info = torch.finfo(dtype)
        return cls(info.eps, info.smallest_normal, info.max)

    @classmethod
    def of_byte_float(cls, kv_format: str) -> Grid:
        """Grid of a format of :data:`~page4.kernels.codecs.BYTE_FLOATS`."""
        spec = BYTE_FLOATS[kv_format]
        return cls(2.0**-spec.mantissa_bits, spec.smallest_normal, spec.max_value)

    def half_step(self, magnitude: Tensor) -> Tensor:
        """Farthest that rounding to nearest moves a float64 number of this magnitude, saturation apart."""
        bits = magnitude.clamp(self.smallest_normal, self.largest).view(torch.int64)
        return (bits & _EXPONENT_BITS).view(torch.float64) * (self.eps / 2)


@dataclass(frozen=True)
class Near:
    """Exact numbers and how far from each a right result may be; float64 of one shape."""

    value: Tensor
    error: Tensor

    @classmethod
    def exactly(cls, value: Tensor) -> Near:
        """Numbers that nothing has rounded."""
        return cls(value.double(), torch.zeros_like(value, dtype=torch.float64))

    def __getitem__(self, index: object) -> Near:
        """The same part of both tensors."""
        return Near(self.value[index], self.error[index])  # type: ignore[index]

    @property
    def magnitude(self) -> Tensor:
        """Largest magnitude that a right result may have."""
        return self.value.abs() + self.error

    def computed(self, roundings: float) -> Near:
        """After FP32 operations, each of which may be off by one rounding of its result."""
        return Near(self.value, self.error + roundings * FP32_ROUNDING * self.magnitude)

    def rounded(self, grid: Grid) -> Near:
        """After rounding to nearest on a grid."""
        return Near(self.value, self.error + grid.half_step(self.magnitude))

    def share(self, actual: Tensor) -> float:
        """Largest distance of a result as a share of what is permitted; infinite where it is NaN."""
        if actual.numel() == 0:
            return 0.0
        share = (actual.double() - self.value).abs() / self.error.clamp_min(_TINY)
        return float(share.nan_to_num(torch.inf).max())


def normed(x: Near, weight: Tensor) -> Near:
    """Zero-centred RMS norm in FP32 over the last axis, ``[..., D]``, not yet rounded to another dtype.

    Its roundings, relative to the result: D of squares and their sum in any order, one of ``eps`` and one of
    adding it, all halved by the root; four of a reciprocal root within two last places; three of the gain and
    its two products.
    """
    value = rms_norm_zero_centred(x.value, weight.double(), EPS)
    inverse = torch.rsqrt(x.value.square().mean(-1, keepdim=True) + EPS)
    # The root mean square moves by at most that of the errors.
    error = x.error + x.value.abs() * inverse * x.error.square().mean(-1, keepdim=True).sqrt()
    moved = Near(value, error * inverse * (1 + weight.double()).abs())
    return moved.computed((x.value.shape[-1] + 2) / 2 + 4 + 3)


def turned(x: Near, cos: Tensor, sin: Tensor) -> Near:
    """Rotary embedding in FP32 of all features, ``[..., heads, rot]``, by FP32 tables ``[..., rot]``."""
    first, second = x.computed(2).error.chunk(2, dim=-1)  # a product and the sum
    cos, sin = cos.double(), sin.double()
    swapped = torch.cat((second, first), dim=-1)
    error = torch.cat((first, second), dim=-1) * cos.abs().unsqueeze(-2) + swapped * sin.abs().unsqueeze(-2)
    return Near(apply_rope(x.value, cos, sin), error)


def partly_turned(x: Near, cos: Tensor, sin: Tensor, grid: Grid | None) -> Near:
    """:func:`turned` of the leading features, rounded on a grid if one is given; the others pass through."""
    rot = cos.shape[-1]
    leading, rest = turned(x[..., :rot], cos, sin), x[..., rot:]
    if grid is not None:
        leading = leading.rounded(grid)
    return Near(torch.cat((leading.value, rest.value), -1), torch.cat((leading.error, rest.error), -1))


def stored(x: Near, dtype: torch.dtype, kv_format: str, scale: float | Tensor) -> Near:
    """What numbers of a dtype may be in pages of a format, in units of the scale.

    ``scale`` is a number or, of int8, a tensor that broadcasts: the scales that were used.
    """
    if kv_format in ("fp16", "fp32"):
        pages = STORAGE_DTYPES[kv_format]
        return x if torch.promote_types(dtype, pages) == pages else x.rounded(Grid.of_dtype(pages))
    quotient = Near(x.value / scale, x.error / scale).computed(2)  # of the scale to FP32, and the division
    if kv_format == "int8":
        return Near(quotient.value.clamp(-INT8_MAX, INT8_MAX), quotient.error + 0.5)
    grid = Grid.of_byte_float(kv_format)
    return Near(quotient.value.clamp(-grid.largest, grid.largest), quotient.error).rounded(grid)


@dataclass(frozen=True)
class ExactPreparation:
    """Results of some requests of a step, worked out before a launch overwrites the ring.

    Attributes:
        rows: the requests' rows, int64 ``[n]``.
        slots: int64 ``[n]``, where their K and V go.
        requests: the requests, int64 ``[S]``.
        q, k, index_q: ``[n, heads, D]``; ``k`` is what becomes of K before it is stored.
        ring: ``[S, cap, Di]``, raw keys that must be there, exactly.
        blocks: int64 ``[C, 2]``, page and place in the page of each block that the step completes.
        compressed: ``[C, Di]``, their keys.
    """

    rows: Tensor
    slots: Tensor
    requests: Tensor
    q: Near
    k: Near
    index_q: Near
    ring: Tensor
    blocks: Tensor
    compressed: Near

    @classmethod
    def of(cls, inputs: PrepareInputs, requests: Sequence[int]) -> ExactPreparation:
        """Results by the definitions of the kernel's parts. Synchronises with the device."""
        device, dtype = inputs.q_gate.device, inputs.q_gate.dtype
        chosen = torch.tensor(requests, dtype=torch.int64, device=device)
        rows = torch.isin(inputs.rows.request, chosen.int()).nonzero().squeeze(1)
        index = inputs.index.unflatten(1, (-1, inputs.storage.ring.shape[2]))
        cos, sin = _cos_sin(inputs.angles, inputs.rows.positions[rows])
        grid = Grid.of_dtype(dtype)

        def heads(x: Tensor, weight: Tensor) -> Near:
            return partly_turned(normed(Near.exactly(x), weight).rounded(grid), cos, sin, grid)

        keys = [_index_keys(inputs, request, index[:, -1]) for request in requests]
        rings, blocks, values, errors = zip(*keys, strict=True)
        compressed = Near(torch.cat(values), torch.cat(errors))
        return cls(
            rows,
            inputs.rows.slots[rows],
            chosen,
            heads(inputs.q_gate[rows, :, : inputs.k.shape[2]], inputs.norms.q),
            heads(inputs.k[rows], inputs.norms.k),
            heads(index[rows, :-1], inputs.norms.index_q),
            torch.stack(rings),
            torch.cat(blocks),
            compressed.rounded(Grid.of_dtype(inputs.storage.compressed_pages.dtype)),
        )

    def shares(self, inputs: PrepareInputs, q: Tensor, index_q: Tensor) -> dict[str, float]:
        """Largest error of each part that was written, as a share of what is permitted.

        Parts that must be exact have 0 or infinity.
        """
        storage = inputs.storage
        compressed = storage.compressed_pages[self.blocks[:, 0], self.blocks[:, 1]]
        return {
            "q": self.q.share(q[self.rows]),
            "index_q": self.index_q.share(index_q[self.rows]),
            "k": self._share_of_k(inputs),
            "v": _exact(*self._v(inputs)),
            "ring": _exact((storage.ring[self.requests], self.ring)),
            "compressed": self.compressed.share(compressed),
        }

    def _share_of_k(self, inputs: PrepareInputs) -> float:
        storage, (page, offset) = inputs.storage, self._places()
        scale: float | Tensor = storage.k_scale
        share = 0.0
        if storage.k_scale_pages is not None:
            written = storage.k_scale_pages[page, :, offset]
            largest = Near(self.k.value.abs().amax(-1), self.k.error.amax(-1))
            wanted = Near(largest.value / INT8_MAX, largest.error / INT8_MAX).computed(1)
            share = Near(wanted.value.clamp_min(_TINY), wanted.error).share(written)
            scale = written.double()[..., None]
        k = stored(self.k, inputs.k.dtype, storage.kv_format, scale)
        return max(share, k.share(decode_kv(storage.k_pages[page, :, offset], storage.kv_format)))

    def _v(self, inputs: PrepareInputs) -> list[tuple[Tensor, Tensor]]:
        """Codes of V, and of int8 its scales, each with what they must be."""
        storage, (page, offset) = inputs.storage, self._places()
        codes, v = storage.v_pages[page, :, offset], inputs.v[self.rows]
        if storage.v_scale_pages is None:
            return [(codes, encode_kv(v, storage.kv_format, storage.v_scale))]
        wanted, scales = encode_int8_rows(v)
        return [(codes, wanted), (storage.v_scale_pages[page, :, offset], scales)]

    def _places(self) -> tuple[Tensor, Tensor]:
        return self.slots // PAGE_TOKENS, self.slots % PAGE_TOKENS


def _exact(*pairs: tuple[Tensor, Tensor]) -> float:
    """Zero where both of each pair have the same bits, else infinity."""
    equal = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    return 0.0 if equal else float("inf")


def _cos_sin(angles: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 ``[N, rot]``, both halves alike."""
    cos, sin = angles[positions].chunk(2, dim=-1)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def _index_keys(inputs: PrepareInputs, request: int, raw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a request: its ring; pages and places of the blocks it completes; their keys and errors."""
    storage = inputs.storage
    capacity, per_page = storage.ring.shape[1], storage.compressed_pages.shape[1]
    ratio = PAGE_TOKENS // per_page
    mine = inputs.rows.request == request
    positions, raw = inputs.rows.positions[mine], raw[mine].to(storage.ring.dtype)
    start, before = int(positions[0]), storage.ring[request]
    ring = before.clone()
    ring[positions[-capacity:] % capacity] = raw[-capacity:]

    opened = torch.arange(start - start % ratio, start, device=raw.device)
    keys = torch.cat((before[opened % capacity], raw)).double()
    complete = len(keys) // ratio
    keys = keys[: complete * ratio].view(complete, ratio, keys.shape[1])
    # Numbers of both signs: what the sum of a block may be off by is relative to their magnitudes.
    mean = Near(keys.mean(1), (ratio - 1) * FP32_ROUNDING * keys.abs().mean(1))
    block = start // ratio + torch.arange(complete, device=raw.device)
    key = normed(mean, inputs.norms.index_k)[:, None]
    key = partly_turned(key, *_cos_sin(inputs.angles, block * ratio), None)[:, 0]
    pages = inputs.rows.block_tables[request, block // per_page]
    return ring, torch.stack((pages, block % per_page), 1), key.value, key.error
