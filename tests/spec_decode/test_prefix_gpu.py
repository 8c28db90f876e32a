"""On a GPU, with the shipped model: reuse, tiers and preemption change no token after 30,030 of real text.

The model runs in FP32: batches of other sizes sum in another order, which decides nothing there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from page4.kvcache.copy_queue import StreamQueue, Ticket
from page4.kvcache.prefix_cache import PrefixConfig
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import DecoderConfig, SpeculativeDecoder, calibrate_scales, generate
from tests.spec_decode.shipped import on_gpu, shipped_model, shipped_texts

pytestmark = on_gpu
LENGTH, CHANGED, NEW = 30_030, 40, 48


@pytest.fixture(scope="module")
def trained() -> Qwen4ExpForCausalLM:
    return shipped_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """A prompt, its repeat, and its repeat with a changed suffix."""
    texts = shipped_texts()
    long = next(text for text in texts if len(text) > LENGTH + CHANGED)
    prompt = list(long[:LENGTH])
    return [prompt, prompt, [*prompt[:-CHANGED], *long[LENGTH : LENGTH + CHANGED]]]


def outputs(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[list[int]]:
    """What is emitted, after a check that no page was lost."""
    generations, stats = generate(decoder, prompts, NEW)
    decoder.cache.tables.check()
    assert decoder.cache.tables.pool.held == 0
    print(
        f"{stats.prefill_tokens} tokens prefilled, {stats.preemptions} preemptions, {stats.diverged} diverged"
    )
    return [generation.tokens for generation in generations]


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3"])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_everything_on_equals_everything_off(
    trained: Qwen4ExpForCausalLM,
    prompts: list[list[int]],
    tmp_path: Path,
    kv_format: str,
    num_draft_tokens: int,
    concurrency: int,
) -> None:
    scales = calibrate_scales(trained, [prompts[0][:2048]]) if kv_format == "e4m3" else None
    options: dict[str, Any] = {
        "kv_format": kv_format, "scales": scales, "num_draft_tokens": num_draft_tokens,
        "max_length": LENGTH + NEW, "max_requests": concurrency,
    }  # fmt: skip
    prefix = PrefixConfig(snapshots=2, host_gib=1, folder=tmp_path / "prefixes", model="shipped")
    off = outputs(SpeculativeDecoder(trained, DecoderConfig(**options)), prompts)
    options |= {"prefix": prefix, "preemption": True, "max_tokens": LENGTH + 2 * NEW}
    for reuse in ("computed once", "restarted"):
        decoder = SpeculativeDecoder(trained, DecoderConfig(**options))
        assert outputs(decoder, prompts) == off, reuse
        assert decoder.prefix is not None
        print(decoder.prefix.metrics())
        assert decoder.prefix.stats.reused_tokens > LENGTH
        decoder.prefix.close()
    assert decoder.prefix.stats.file_hits > 0


def test_copies_that_are_late_delay_a_request_and_change_nothing(
    trained: Qwen4ExpForCausalLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every copy of the side stream begins about 0.1 s late, and pages are overwritten in between."""
    submit = StreamQueue.submit

    def late(self: StreamQueue, copy: Any) -> Ticket:
        return submit(self, lambda: (torch.cuda._sleep(200_000_000), copy()))

    monkeypatch.setattr(StreamQueue, "submit", late)
    length = 6 * 2048
    short = [prompts[0][:length], prompts[2][-length:], prompts[0][:length]]
    options: dict[str, Any] = {"max_length": length + NEW, "max_requests": 1}
    off = outputs(SpeculativeDecoder(trained, DecoderConfig(**options)), short)
    prefix = PrefixConfig(interval=4096, snapshots=0, host_gib=1)
    decoder = SpeculativeDecoder(trained, DecoderConfig(**options, prefix=prefix))
    assert outputs(decoder, short) == off
    assert decoder.prefix is not None and decoder.prefix.stats.host_hits == 1
    decoder.prefix.close()
    assert decoder.prefix.host is not None and decoder.prefix.host.back.seconds > 0.1
