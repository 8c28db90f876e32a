"""Static KV scales measured by an FP16 run."""

from __future__ import annotations

from collections.abc import Sequence

from page4.kvcache import KVScales, ScalePair, get_format, scale_for_maximum
from page4.kvcache.cache import QSALayerCache
from page4.model import Qwen4ExpForCausalLM

from .engine import DecoderConfig, SpeculativeDecoder


def calibrate_scales(
    model: Qwen4ExpForCausalLM,
    texts: Sequence[Sequence[int]],
    kv_format: str = "e4m3",
    prefill_chunk: int = 2048,
) -> KVScales:
    """Smallest FP32 scales that keep every |K| and |V| of the texts within the format, per layer.

    K is observed as cached (after norm and RoPE), V as projected, in an FP16 cache, of the target's QSA
    layers and of the MTP layer, whose rows see the target's streams and the true next token.

    A format that computes a scale per token and KV head as it writes needs none: its scales are empty, and
    nothing is run.

    Args:
        texts: token ids, run one after the other.
    Raises:
        InputError: no texts, an unknown format, or a text longer than the model's positions.
    """
    if get_format(kv_format).has_token_scales:
        return KVScales(())
    maximum = get_format(kv_format).max_value
    layers = model.config.qsa_layers
    peaks = [[0.0, 0.0] for _ in range(len(layers) + (model.mtp is not None))]
    config = DecoderConfig(
        kv_format="fp16",
        num_draft_tokens=1 if model.mtp is not None else 0,
        prefill_chunk=prefill_chunk,
        max_length=max((len(text) for text in texts), default=1),
    )
    decoder = SpeculativeDecoder(model, config)
    for text in texts:
        request = decoder.open(text)
        while request.computed < request.prompt_length:
            stop = min(request.computed + prefill_chunk, request.prompt_length)
            decoder.prefill({request: stop})
        caches = list(decoder.cache.qsa)
        if decoder.cache.draft is not None:
            assert isinstance(decoder.cache.draft.mixer, QSALayerCache)
            caches.append(decoder.cache.draft.mixer)
        for peak, cache in zip(peaks, caches, strict=True):
            k, v = cache.largest(request.row, len(text))
            peak[0], peak[1] = max(peak[0], k), max(peak[1], v)
        decoder.close(request)
    pairs = [ScalePair(scale_for_maximum(k, maximum), scale_for_maximum(v, maximum)) for k, v in peaks]
    return KVScales(tuple(pairs[: len(layers)]), pairs[-1] if model.mtp is not None else None)
