"""The Triton backend computes what the reference backend computes, and is never chosen in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from page4.kernels.backend import resolve_backend
from page4.kernels.errors import InputError
from page4.kvcache import CacheConfig, KVScales, ScalePair
from page4.model import Qwen4ExpForCausalLM, RowBatch, Segment
from page4.model.backend import checked_backend
from tests.kvcache.scenario import qsa_caches
from tests.oracle.tiny import tiny_dict, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = KVScales((ScalePair(0.02, 0.03),) * 4, ScalePair(0.02, 0.03))


def run(model: Qwen4ExpForCausalLM, backend: str, kv_format: str) -> tuple[list[Tensor], list[Tensor]]:
    """Two requests: prefill of unequal chunks, then verify rows beside a chunk; drafts of all rows."""
    model.use_backend(backend)
    layers = len(model.config.qsa_layers)
    scales = None if kv_format == "int8" else KVScales(SCALES.target[:1] * layers, SCALES.draft)
    exact = torch.float32 if "fp32" in kv_format else torch.float16
    cache = model.new_cache(
        CacheConfig(kv_format=kv_format, scales=scales, max_requests=2, max_tokens=128, index_dtype=exact)
    )
    for layer in qsa_caches(cache):
        for scales in (layer.k_token_scales, layer.v_token_scales):
            if scales is not None:
                scales.fill_(torch.nan)  # of slots that nothing is written to
    text = torch.randint(1, model.config.vocab_size, (2, 25), generator=torch.Generator().manual_seed(0))
    for row in range(2):
        assert cache.open() == row
        cache.reserve(row, 25)

    def segment(row: int, start: int, stop: int, decode: bool = False) -> Segment:
        ids = text[row, start:stop]
        return Segment(row, start, ids, model.preceding(text[row], start), decode)

    steps = [
        [segment(0, 0, 21), segment(1, 0, 3)],
        [segment(0, 21, 25, decode=True), segment(1, 3, 10)],
    ]
    logits, drafts = [], []
    for segments in steps:
        batch = RowBatch.pack(segments, model.device)
        streams = model.forward_rows(batch, cache)
        logits.append(model.logits(streams))
        drafts.append(model.draft_logits(model.draft_rows(batch, streams, cache)))
    return logits, drafts


@pytest.mark.parametrize("kv_format", ["fp32", "int8", "e4m3,3:fp32"])
def test_triton_equals_the_reference(kv_format: str) -> None:
    model = tiny_model().to(DEVICE)
    reference, triton = run(model, "reference", kv_format), run(model, "triton", kv_format)
    # A value that lies on the edge between two codes may be stored as either.
    tolerance = 1e-4 if kv_format == "fp32" else 2e-2
    for expected, actual in zip(reference, triton, strict=True):
        for a, b in zip(expected, actual, strict=True):
            assert b.isfinite().all()
            assert (a - b).abs().max() <= tolerance * a.abs().max()


def rotated(share: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": share}}


UNSUPPORTED = [
    ({"head_dim": 48}, "head_dim one of 32, 64, 128, 256, the model has 48"),
    ({"head_dim": 16}, "head_dim one of 32, 64, 128, 256, the model has 16"),
    ({"head_dim": 512, **rotated(1 / 64)}, "head_dim one of .*, the model has 512"),
    ({"indexer_head_dim": 24}, "indexer_head_dim a power of two, the model has 24"),
    (rotated(0.375), "rotary dimension a power of two, the model has 12"),
    ({"indexer_compress_ratio": 2}, "indexer_compress_ratio 4, the model has 2"),
    ({"num_attention_heads": 34, "num_key_value_heads": 2}, "per KV head at most 16, the model has 17"),
    ({"linear_key_head_dim": 24}, "linear_key_head_dim one of 16, .*, 256, the model has 24"),
    ({"linear_value_head_dim": 512}, "linear_value_head_dim one of .*, the model has 512"),
    ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim at most 4, the model has 5"),
    ({"indexer_budget": 2052}, "indexer_compress_ratio at most 512, the model has 513"),
]


@pytest.mark.parametrize(("sizes", "message"), UNSUPPORTED)
def test_sizes_without_kernels_are_refused_when_the_backend_is_chosen(
    sizes: dict[str, Any], message: str
) -> None:
    """And the reference, which runs them all, stays."""
    model = tiny_model(**sizes).to(DEVICE)
    with pytest.raises(InputError, match=f"^backend 'triton' needs .*{message}$") as caught:
        model.use_backend("triton")
    assert "\n" not in str(caught.value)
    assert model(torch.tensor([[1, 2, 3, 4, 5]])).logits.isfinite().all()


def test_a_checkpoint_without_kernels_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = json.dumps(tiny_dict(indexer_compress_ratio=8))
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(InputError, match="needs indexer_compress_ratio 4, the model has 8"):
        Qwen4ExpForCausalLM.from_pretrained(tmp_path, device=DEVICE, backend="triton")
    with pytest.raises(InputError, match="no checkpoint there"):
        Qwen4ExpForCausalLM.from_pretrained(tmp_path)


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(InputError, match=r"dtype torch.float16 or torch.float32, the model has torch.bfloat"):
        tiny_model().to(DEVICE, torch.bfloat16).use_backend("triton")


def test_without_a_choice_the_kernels_run_what_they_are_made_for() -> None:
    config, half = tiny_model().config, torch.float16
    assert checked_backend(None, config, half, "cuda") == "triton"
    assert checked_backend(None, config, torch.bfloat16, "cuda") == "reference"
    assert checked_backend(None, config, half, "cpu") == "reference"


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InputError, match="'cuda' is unknown, expected one of reference, triton"):
        resolve_backend("cuda", "cpu")


def test_triton_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(InputError, match="needs a GPU, the device is cpu"):
        resolve_backend("triton", "cpu")
    assert resolve_backend("triton", "cuda") == "triton"
