"""A short life of one request, with all that touches a cache: prefill, verification, drafting, rejection."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from page4.kvcache import CacheConfig, HybridCache, KVScales, LayerFormats, ScalePair
from page4.kvcache.cache import QSALayerCache
from page4.kvcache.layer_formats import draft_format
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment
from tests.oracle.steps import Stepper
from tests.oracle.tiny import random_tokens

# Of a format that needs scales; int8 computes its own and refuses others.
SCALES = KVScales((ScalePair(0.011, 0.007), ScalePair(0.013, 0.009)), ScalePair(0.012, 0.008))
TOKENS = random_tokens(80, seed=11)
NUM_DRAFT_TOKENS = 3


def config(
    kv_format: str = "fp16", draft: str | None = None, scales: KVScales | Literal["usable"] | None = "usable"
) -> CacheConfig:
    """A cache for :func:`play`; ``usable`` scales are those of ``SCALES`` that the formats do not refuse."""
    if scales == "usable":
        target = LayerFormats(kv_format)
        refused = (
            any(used.has_token_scales for used in target.distinct),
            draft_format(target, draft).has_token_scales,
        )
        scales = KVScales(() if refused[0] else SCALES.target, None if refused[1] else SCALES.draft)
    return CacheConfig(
        kv_format=kv_format,
        draft_kv_format=draft,
        scales=scales,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        max_requests=2,
        max_tokens=256,
        index_dtype=torch.float32 if "fp32" in LayerFormats(kv_format).names else torch.float16,
    )


def play(model: Qwen4ExpForCausalLM, cache: HybridCache) -> tuple[Tensor, Tensor]:
    """Target and draft logits of a prompt in two chunks and of verify steps that keep 1 to K+1 rows."""
    stepper = Stepper(model, cache)
    target, draft = [], []
    junk = [5] * NUM_DRAFT_TOKENS
    for chunk in (TOKENS[:32], TOKENS[32:41]):
        streams = stepper.prefill(chunk)
        target.append(streams)
        draft.append(_draft(model, cache, stepper, streams))
    for keep in (1, 4, 2, 1, 3, 4):
        start = len(stepper.tokens)
        rows = (TOKENS[start : start + keep] + junk)[: NUM_DRAFT_TOKENS + 1]
        streams = stepper.decode(rows, keep=keep)[:keep]
        target.append(streams)
        draft.append(_draft(model, cache, stepper, streams))
    return model.logits(torch.cat(target)), model.draft_logits(torch.cat(draft))


def _draft(model: Qwen4ExpForCausalLM, cache: HybridCache, stepper: Stepper, streams: Tensor) -> Tensor:
    """Step 0 over the new rows, then recursion into rows that the next step 0 writes again."""
    end = len(stepper.tokens)
    start = end - streams.shape[0]
    cache.reserve(stepper.request, end + NUM_DRAFT_TOKENS)
    outputs = []
    rows = streams
    for position, tokens in ((start, TOKENS[start + 1 : end + 1]), (end, [9]), (end + 1, [8])):
        segment = Segment(stepper.request, position, torch.tensor(tokens), (), decode=True)
        rows = model.draft_rows(RowBatch.pack([segment], model.device), rows, cache)
        outputs.append(rows)
        rows = rows[-1:]
    return torch.cat(outputs)


def qsa_caches(cache: HybridCache) -> list[QSALayerCache]:
    """The QSA layers of the target, then the draft's."""
    assert cache.draft is not None and isinstance(cache.draft.mixer, QSALayerCache)
    return [*cache.qsa, cache.draft.mixer]


def rows_of(pages: Tensor, stepper: Stepper, length: int) -> Tensor:
    """What a paged tensor ``[P, H, 16, D]`` holds for a request's first positions, ``[length, H, D]``."""
    slots = stepper.cache.tables.of(torch.tensor([stepper.request]), length).slots(
        torch.arange(length)[None]
    )[0]
    return pages[slots // 16, :, slots % 16]
