"""On a GPU, with the shipped model: speculation changes no token of long continuations of real text.

With 64 segments of 256 tokens. Verification multiplies K + 1 rows at once where plain decoding multiplies
one, and a sum in another order may be another number, so the model runs in FP32, where that decides nothing.
"""

from __future__ import annotations

import pytest

from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import DecoderConfig, SpeculativeDecoder, calibrate_scales, generate
from tests.spec_decode.shipped import on_gpu, shipped_model, shipped_texts

pytestmark = on_gpu
SEGMENTS, NEW, PROMPT = 64, 256, 192


@pytest.fixture(scope="module")
def trained() -> Qwen4ExpForCausalLM:
    return shipped_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    texts = shipped_texts()
    return [texts[i % len(texts)][500 * i : 500 * i + PROMPT - i % 37] for i in range(SEGMENTS)]


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3"])
@pytest.mark.parametrize("concurrency", [1, 2, 4, 8])
def test_speculation_changes_no_token(
    trained: Qwen4ExpForCausalLM, prompts: list[list[int]], kv_format: str, concurrency: int
) -> None:
    scales = calibrate_scales(trained, prompts[:8]) if kv_format == "e4m3" else None
    outputs = []
    for drafts in (0, 3):
        config = DecoderConfig(
            kv_format,
            scales=scales,
            num_draft_tokens=drafts,
            max_length=PROMPT + NEW,
            max_requests=concurrency,
        )
        generations, _ = generate(SpeculativeDecoder(trained, config), prompts, NEW)
        outputs.append([generation.tokens for generation in generations])
    differing = [i for i, (a, b) in enumerate(zip(*outputs, strict=True)) if a != b]
    print(f"{kv_format}, concurrency {concurrency}: {len(differing)} of {SEGMENTS} segments differ")
    assert not differing
