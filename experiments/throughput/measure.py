"""One prompt of one arm: how fast its prefill and its decode steps are, and what they accept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from page4.experiments.acceptance.config import Arm
from page4.experiments.samples import Row
from page4.experiments.step_timing import time_steps
from page4.experiments.throughput.config import ThroughputConfig
from page4.kvcache import KVScales
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import DecoderConfig, SamplingOptions, SpeculativeDecoder
from page4.spec_decode.metrics import repeated_ngrams

COLUMNS: dict[str, type] = {
    "arm": str,
    "length": int,
    "text": str,
    "prompt": str,
    "reused_tokens": int,
    "prefill_tokens": int,
    "prefill_seconds": float,
    "steps": int,
    "step_p50_ms": float,
    "step_p90_ms": float,
    "decode_tokens": int,
    "decode_seconds": float,
    "drafted": int,
    "accepted": int,
    "repeated_4grams": float,
}
"""A row per arm, length and prompt. ``drafted`` and ``accepted`` count all steps of the prompt, the other
numbers of decoding the timed ones."""

KEY = ("arm", "length", "prompt")


class ArmDecoder:
    """An arm's decoder, which takes one request at a time."""

    def __init__(
        self, model: Qwen4ExpForCausalLM, config: ThroughputConfig, arm: Arm, scales: KVScales | None
    ) -> None:
        assert config.steps is not None
        self.arm, self.steps, self.temperature = arm, config.steps, config.temperature
        self.seed = config.seed
        self.decoder = SpeculativeDecoder(
            model,
            DecoderConfig(
                kv_format=arm.target_format,
                draft_kv_format=arm.draft_format,
                scales=scales,
                num_draft_tokens=config.num_draft_tokens,
                prefill_chunk=config.prefill_chunk,
                max_length=config.max_length,
                prefix=config.prefix,
            ),
        )

    def measure(self, prompt: Sequence[int], seed: int, steps: int | None = None) -> Row:
        """Prefills and continues a prompt; the numbers of `COLUMNS` but for those that name the row.

        Raises:
            RuntimeError: Some of the prompt came from an earlier one, so that its prefill means nothing.
        """
        decoder, tokens = self.decoder, len(prompt) - 1  # the first decode step takes the last one
        sampling = SamplingOptions(self.temperature, seed=seed, sample_drafts=self.temperature > 0)
        request = decoder.open(prompt, sampling)
        try:
            if reused := request.computed:
                raise RuntimeError(
                    f"{reused} tokens of a prompt were found in a cache: its nonce is another's"
                )
            start = decoder.now()
            while request.computed < tokens:
                decoder.prefill({request: min(request.computed + decoder.config.prefill_chunk, tokens)})
            prefill = decoder.now() - start
            decoder.start(request)
            decoder.collect(decoder.launch([request]))  # whatever a first step has to compile
            timed = time_steps(decoder, [request], self.steps if steps is None else steps)
        finally:
            decoder.close(request)
        p50, p90 = np.quantile(timed.seconds, (0.5, 0.9))
        return {
            "reused_tokens": reused,
            "prefill_tokens": tokens,
            "prefill_seconds": prefill,
            "steps": len(timed.seconds),
            "step_p50_ms": 1000 * float(p50),
            "step_p90_ms": 1000 * float(p90),
            "decode_tokens": timed.tokens,
            "decode_seconds": sum(timed.seconds),
            "drafted": decoder.config.num_draft_tokens * len(request.accepted),
            "accepted": sum(request.accepted),
            "repeated_4grams": repeated_ngrams(request.emitted),
        }
