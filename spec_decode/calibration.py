"""Static KV scales measured by a run with an FP16 cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kvcache import KVScales, LayerFormats, ScalePair, get_format
from page4.kvcache.cache import QSALayerCache
from page4.kvcache.intervention import Intervention
from page4.kvcache.layer_formats import draft_format, scales_of
from page4.kvcache.magnitudes import Magnitudes
from page4.kvcache.scale_rules import ScaleRule, choose_scale
from page4.model import Qwen4ExpForCausalLM

from .engine import DecoderConfig, SpeculativeDecoder

DRAFT = "draft"
"""What an observation calls the MTP layer; QSA layers go by their index."""


@dataclass(frozen=True)
class KVObservation:
    """Magnitudes of K (after norm and RoPE, as cached) and of V, of every layer that has them.

    Attributes:
        layers: ``(K, V)`` by layer: QSA layers by index in their order, then the MTP layer as ``draft``.
    """

    layers: Mapping[str, tuple[Magnitudes, Magnitudes]]

    def __add__(self, other: KVObservation) -> KVObservation:
        """What both saw together.

        Raises:
            InputError: they observed different layers or numbers of heads.
        """
        if _shapes(self) != _shapes(other):
            raise InputError("observations of different layers or heads cannot be added")
        pairs = ((name, pair, other.layers[name]) for name, pair in self.layers.items())
        return KVObservation({name: (a[0] + b[0], a[1] + b[1]) for name, a, b in pairs})

    def scales(self, kv_format: str, rule: ScaleRule = "max", percent: float = 99.99) -> KVScales:
        """Scales of a format by a rule, see :func:`choose_scale`.

        Raises:
            InputError: an unknown format or one without static scales, or a layer saw nothing but zeros.
        """
        wanted = get_format(kv_format)
        if not wanted.needs_scale:
            raise InputError(f"KV format {kv_format} has no static scales to calibrate")
        pairs = {
            name: ScalePair(*(choose_scale(part, wanted, rule, percent) for part in pair))
            for name, pair in self.layers.items()
        }
        draft = pairs.pop(DRAFT, None)
        return KVScales(tuple(pairs.values()), draft)

    def scales_for(
        self, kv_format: str, draft_kv_format: str | None = None, rule: ScaleRule = "max"
    ) -> KVScales | None:
        """Scales of a cache of these formats, see :class:`~page4.kvcache.CacheConfig`; None if it needs none.

        Raises:
            InputError: an unknown format, or a layer that is not observed or saw nothing but zeros.
        """
        target = LayerFormats(kv_format)
        draft = draft_format(target, draft_kv_format)
        layers = [int(name) for name in self.layers if name != DRAFT]
        static = dict.fromkeys(used.name for used in (*target.distinct, draft) if used.needs_scale)
        return scales_of(target, draft, layers, {name: self.scales(name, rule) for name in static})


class KVObserver:
    """Runs texts through a model with an FP16 cache and counts what is stored of them.

    Only rows of the texts are read, by their position: neither padding, nor pages of earlier requests, nor
    anything that was run to warm up is among them.

    Args:
        longest: tokens of the longest text.
        interventions: what a study changes in layers; what is then stored is what is counted.
    Raises:
        InputError: ``longest`` exceeds the model's positions.
    """

    def __init__(
        self,
        model: Qwen4ExpForCausalLM,
        longest: int,
        prefill_chunk: int = 2048,
        interventions: Mapping[int | None, Intervention] | None = None,
    ) -> None:
        config = DecoderConfig(
            kv_format="fp16",
            num_draft_tokens=1 if model.mtp is not None else 0,
            prefill_chunk=prefill_chunk,
            max_length=longest,
        )
        self._decoder = SpeculativeDecoder(model, config, interventions)
        self._layers = model.config.qsa_layers

    @torch.inference_mode()
    def observe(self, text: Sequence[int]) -> KVObservation:
        """Magnitudes of one text's K and V.

        The MTP layer's rows see the target's streams and the true next token, so there is none for the text's
        last token.

        Raises:
            InputError: the text cannot be a prompt of this model, or a value is not finite in FP16.
        """
        decoder = self._decoder
        request = decoder.open(text)
        try:
            while request.computed < request.prompt_length:
                stop = min(request.computed + decoder.config.prefill_chunk, request.prompt_length)
                decoder.prefill({request: stop})
            return KVObservation(
                {
                    name: (Magnitudes.of(k, f"K of layer {name}"), Magnitudes.of(v, f"V of layer {name}"))
                    for name, k, v in self._stored(request.row, len(text))
                }
            )
        finally:
            decoder.close(request)

    def _stored(self, row: int, length: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(layer, K, V) of a request, K and V ``[rows written, Hkv, D]``."""
        cache = self._decoder.cache
        for index, layer in zip(self._layers, cache.qsa, strict=True):
            yield str(index), *layer.stored(row, length)
        if cache.draft is not None:
            assert isinstance(cache.draft.mixer, QSALayerCache)
            yield DRAFT, *cache.draft.mixer.stored(row, length - 1)


def observe_texts(
    model: Qwen4ExpForCausalLM,
    texts: Sequence[Sequence[int]],
    prefill_chunk: int = 2048,
    interventions: Mapping[int | None, Intervention] | None = None,
) -> KVObservation:
    """What a model stores of texts, run one after the other.

    Raises:
        InputError: no texts, or one that cannot be a prompt of this model.
    """
    if not texts:
        raise InputError("nothing to calibrate from: there are no texts")
    observer = KVObserver(model, max(map(len, texts)), prefill_chunk, interventions)
    first, *others = texts
    observation = observer.observe(first)
    for text in others:
        observation += observer.observe(text)
    return observation


def calibrate_scales(
    model: Qwen4ExpForCausalLM,
    texts: Sequence[Sequence[int]],
    kv_format: str = "e4m3",
    prefill_chunk: int = 2048,
) -> KVScales:
    """Smallest FP32 scales that keep every |K| and |V| of the texts within the format, per layer.

    A format that computes a scale per token and KV head as it writes needs none: its scales are empty, and
    nothing is run.

    Args:
        texts: token ids, run one after the other.
    Raises:
        InputError: no texts, an unknown format, or a text longer than the model's positions.
    """
    if get_format(kv_format).has_token_scales:
        return KVScales(())
    return observe_texts(model, texts, prefill_chunk).scales(kv_format)


def _shapes(observation: KVObservation) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, part.counts.shape) for name, pair in observation.layers.items() for part in pair]
