"""The hybrid cache: paged K/V and index keys of QSA layers, recurrent slots of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from page4.kernels.errors import InputError

from .formats import KVFormat
from .intervention import UNCHANGED, Intervention
from .layer_formats import LayerFormats, draft_format
from .pages import PAGE_TOKENS, BlockTables, RequestPages, pages_for
from .recurrent import ConvSlots, GatedDeltaSlots
from .scales import UNIT_SCALES, KVScales, ScalePair


@dataclass(frozen=True)
class CacheGeometry:
    """Sizes the cache needs to know of a model. Lengths are in tokens, dims in components."""

    layer_types: tuple[str, ...]
    ple_layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    index_dim: int
    compress_ratio: int
    delta_heads: int
    delta_key_dim: int
    delta_value_dim: int
    conv_channels: int
    conv_length: int
    ple_channels: int
    ple_length: int
    has_draft: bool

    @property
    def qsa_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have K/V, the MTP layer not among them."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "qsa_attention")


@dataclass(frozen=True)
class CacheConfig:
    """What a user chooses.

    Attributes:
        kv_format: format of the target's K/V, of all QSA layers or with exceptions: see
            :class:`~page4.kvcache.layer_formats.LayerFormats`.
        draft_kv_format: format of the MTP layer's K/V; None means the target's, exceptions aside.
        scales: static scales; required by formats that need them, refused by int8, whose scales are computed
            per token and KV head, ignored by fp16 and fp32. Where formats differ by layer, the pairs of
            layers that need none are not read.
        num_draft_tokens: K; sets the recurrent slots (K+1) and the raw-key ring.
        max_requests: rows for requests that are open at once.
        max_tokens: tokens that all open requests may hold together (rounded up to pages).
        max_request_tokens: tokens that one request may hold; all of them by default.
        index_dtype: dtype of raw and compressed index keys; 16 bits in every study, so that selection itself
            is never quantised further.
    """

    kv_format: str = "fp16"
    draft_kv_format: str | None = None
    scales: KVScales | None = None
    num_draft_tokens: int = 3
    max_requests: int = 1
    max_tokens: int = 4096
    max_request_tokens: int | None = None
    index_dtype: torch.dtype = torch.float16

    @classmethod
    def unquantised(
        cls, dtype: torch.dtype, max_requests: int, max_tokens: int, num_draft_tokens: int = 3
    ) -> Self:
        """K/V and index keys in the activations' own dtype: nothing is lost on the way through the cache."""
        return cls(
            kv_format="fp32" if dtype == torch.float32 else "fp16",
            num_draft_tokens=num_draft_tokens,
            max_requests=max_requests,
            max_tokens=max_tokens,
            index_dtype=dtype,
        )


class QSALayerCache:
    """Storage of one QSA layer.

    Attributes:
        k_pages, v_pages: ``[pages, Hkv, 16, D]`` in the format's storage dtype.
        k_token_scales, v_token_scales: FP32 ``[pages, Hkv, 16]`` for a format with a scale per token and KV
            head, else None. A scale lies in its token's slot, so whatever holds for a page holds for both.
        compressed_pages: ``[pages, 16 / r, Di]``, one key per complete r-token block, norm and RoPE applied.
        ring: ``[requests, capacity, Di]`` raw index keys; position p stands at ``p % capacity``. The capacity
            ``r * ceil((r + K) / r)`` keeps the open block's keys out of reach of K rejected rows.
        k_scale, v_scale: static scales; 1 for formats that carry none.
        intervention: what a study changes, see :meth:`HybridCache.intervene`.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        config: CacheConfig,
        kv_format: KVFormat,
        scales: ScalePair,
        tables: BlockTables,
    ) -> None:
        self.format = kv_format
        self.k_scale, self.v_scale = scales.k, scales.v
        self.intervention: Intervention = UNCHANGED
        self._tables = tables
        pages, device = tables.pool.total, tables.device
        ratio = geometry.compress_ratio
        shape = (pages, geometry.kv_heads, PAGE_TOKENS, geometry.head_dim)
        self.k_pages = torch.zeros(shape, dtype=kv_format.storage, device=device)
        self.v_pages = torch.zeros(shape, dtype=kv_format.storage, device=device)
        self.k_token_scales, self.v_token_scales = (
            torch.zeros(shape[:3], device=device) if kv_format.has_token_scales else None for _ in range(2)
        )
        self.compressed_pages = torch.zeros(
            pages, PAGE_TOKENS // ratio, geometry.index_dim, dtype=config.index_dtype, device=device
        )
        capacity = ratio * -(-(ratio + config.num_draft_tokens) // ratio)
        self.ring = torch.zeros(
            config.max_requests, capacity, geometry.index_dim, dtype=config.index_dtype, device=device
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token's K and V take in this layer, scales per token included."""
        stored = (self.k_pages, self.v_pages, self.k_token_scales, self.v_token_scales)
        slots = self.k_pages.shape[0] * PAGE_TOKENS
        return sum(tensor.nbytes for tensor in stored if tensor is not None) // slots

    def pages(self, requests: Tensor, length: int) -> RequestPages:
        """Block tables of requests ``[B]``, as wide as ``length`` tokens need."""
        return self._tables.of(requests, length)

    def stored(self, request: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the request's first ``length`` tokens as stored, ``[length, Hkv, D]`` each."""
        device = self.k_pages.device
        slots = self.pages(torch.tensor([request], device=device), length).slots(
            torch.arange(length, device=device)[None]
        )[0]
        page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        return self.k_pages[page, :, offset], self.v_pages[page, :, offset]


@dataclass(frozen=True)
class LayerCache:
    """What one decoder layer keeps: its mixer's cache and, where it has one, PLE's convolution state."""

    mixer: QSALayerCache | GatedDeltaSlots
    ple: ConvSlots | None = None


class HybridCache:
    """All caches of a model, and the block tables they share.

    Attributes:
        layers: one entry per target layer.
        draft: the MTP layer's entry, or None.
        tables: block tables.

    Raises:
        InputError: unknown format, one for a layer that has no K/V, one without the scales it needs or with
            scales that it refuses, or a size below 1.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        config: CacheConfig,
        activation_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        for name in ("max_requests", "max_tokens"):
            if getattr(config, name) < 1:
                raise InputError(f"{name} is {getattr(config, name)}, expected at least 1")
        self.config = config
        # Every request may end in a part-filled page.
        pages = pages_for(config.max_tokens) + config.max_requests
        most = None if config.max_request_tokens is None else pages_for(config.max_request_tokens)
        self.tables = BlockTables(config.max_requests, pages, device, most)
        self.recurrent: list[ConvSlots | GatedDeltaSlots] = []
        self._device, self._dtype, self._geometry = device, activation_dtype, geometry
        chosen = LayerFormats(config.kv_format)
        target, draft = chosen.of(geometry.qsa_layers), draft_format(chosen, config.draft_kv_format)
        target_scales = _target_scales(config, target)
        draft_scales = _draft_scales(config, geometry, draft)
        stored = iter(zip(target, target_scales, strict=True))
        self.layers = [
            LayerCache(
                QSALayerCache(geometry, config, *next(stored), self.tables)
                if kind == "qsa_attention"
                else self._delta_slots(),
                self._conv_slots(geometry.ple_length, geometry.ple_channels, torch.float32)
                if i in geometry.ple_layers
                else None,
            )
            for i, kind in enumerate(geometry.layer_types)
        ]
        self.draft = (
            LayerCache(QSALayerCache(geometry, config, draft, draft_scales, self.tables))
            if geometry.has_draft
            else None
        )

    @property
    def qsa(self) -> list[QSALayerCache]:
        """The target's QSA layers, in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, QSALayerCache)]

    @property
    def _sparse(self) -> list[QSALayerCache]:
        """The QSA layers of target and draft."""
        if self.draft is None:
            return self.qsa
        assert isinstance(self.draft.mixer, QSALayerCache)
        return [*self.qsa, self.draft.mixer]

    def intervene(self, changes: Mapping[int | None, Intervention]) -> None:
        """Changes what layers store and read, for a study on the reference backend.

        Args:
            changes: by number of the QSA layer; None is the MTP layer.
        Raises:
            InputError: a layer that has no K/V.
        """
        layers: list[int | None] = list(self._geometry.qsa_layers)
        found = dict(zip(layers if self.draft is None else [*layers, None], self._sparse, strict=True))
        for layer, change in changes.items():
            if layer not in found:
                raise InputError(f"nothing can be changed in layer {layer}: it has no K/V")
            found[layer].intervention = change

    def open(self) -> int:
        """A new request with no tokens and zero recurrent state."""
        request = self.tables.open()
        for slots in self.recurrent:
            slots.reset(request)
        return request

    def reserve(self, request: int, length: int) -> None:
        """Makes room for the request's first ``length`` tokens."""
        self.tables.reserve(request, length)

    def close(self, request: int) -> None:
        """Ends a request; its pages and its row are free again."""
        self.tables.close(request)

    def snapshot(self, requests: Sequence[int]) -> list[Tensor]:
        """A copy of what later tokens of requests overwrite: their recurrent slots and raw index keys.

        K/V and compressed index keys need none: their rows are written again before they are read.
        """
        rows = torch.tensor(list(requests), device=self._device)
        states = [slots.copy_of(rows) for slots in self.recurrent]
        return states + [layer.ring[rows] for layer in self._sparse]

    def restore(self, requests: Sequence[int], snapshot: Sequence[Tensor]) -> None:
        """Puts a snapshot of the same requests back."""
        rows = torch.tensor(list(requests), device=self._device)
        recurrent, rings = snapshot[: len(self.recurrent)], snapshot[len(self.recurrent) :]
        for slots, states in zip(self.recurrent, recurrent, strict=True):
            slots.put_back(rows, states)
        for layer, ring in zip(self._sparse, rings, strict=True):
            layer.ring[rows] = ring

    def paged_tensors(self) -> list[Tensor]:
        """All that is stored by page, ``[pages, ...]`` each: K, V, scales per token, compressed keys."""
        stored = []
        for layer in self._sparse:
            optional = (layer.k_token_scales, layer.v_token_scales)
            stored += [layer.k_pages, layer.v_pages, *(part for part in optional if part is not None)]
            stored.append(layer.compressed_pages)
        return stored

    def prefilled_state(self, request: int) -> list[Tensor]:
        """What a prefill leaves behind of a request beside pages, as views: recurrent states and rings."""
        states = [slots.after_prefill(request) for slots in self.recurrent]
        return states + [layer.ring[request] for layer in self._sparse]

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page in all layers."""
        for stored in self.paged_tensors():
            stored[target].copy_(stored[source])

    def _conv_slots(self, length: int, channels: int, dtype: torch.dtype) -> ConvSlots:
        slots = ConvSlots(
            self.config.max_requests,
            self.config.num_draft_tokens + 1,
            length,
            channels,
            dtype,
            self._device,
        )
        self.recurrent.append(slots)
        return slots

    def _delta_slots(self) -> GatedDeltaSlots:
        g = self._geometry
        slots = GatedDeltaSlots(
            self.config.max_requests,
            self.config.num_draft_tokens + 1,
            g.delta_heads,
            g.delta_key_dim,
            g.delta_value_dim,
            self._conv_slots(g.conv_length, g.conv_channels, self._dtype),
            self._device,
        )
        self.recurrent.append(slots)
        return slots


def _target_scales(config: CacheConfig, formats: tuple[KVFormat, ...]) -> tuple[ScalePair, ...]:
    """Scales of every QSA layer; unit for formats that carry none, refused when missing."""
    given = config.scales.target if config.scales is not None else ()
    static = [used.name for used in formats if used.needs_scale]
    if not static:
        _refuse_given("", formats, given)
        return (UNIT_SCALES,) * len(formats)
    if len(given) != len(formats):
        raise InputError(
            f"KV format {static[0]} needs a K and a V scale for each of {len(formats)} QSA layers, "
            f"{len(given)} given"
        )
    return tuple(pair if used.needs_scale else UNIT_SCALES for used, pair in zip(formats, given, strict=True))


def _draft_scales(config: CacheConfig, geometry: CacheGeometry, draft: KVFormat) -> ScalePair:
    """Scales of the MTP layer; unit for a format that carries none, refused when missing."""
    given = config.scales.draft if config.scales is not None else None
    if not draft.needs_scale:
        _refuse_given("draft ", [draft], given)
        return UNIT_SCALES
    if given is None and geometry.has_draft:
        raise InputError(f"draft KV format {draft.name} needs its own K and V scale, none given")
    return given or UNIT_SCALES


def _refuse_given(whose: str, formats: Sequence[KVFormat], given: object) -> None:
    for used in formats:
        if used.has_token_scales and given:
            raise InputError(
                f"{whose}KV format {used.name} computes a scale per token and KV head: "
                "leave out its static scales"
            )
