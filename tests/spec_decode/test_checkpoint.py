"""Speculation on real text with the trained checkpoint that ships in ``model/checkpoint``."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from page4 import model as model_package
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import DecoderConfig, SpeculativeDecoder, calibrate_scales, generate, measure_rounds
from tests.oracle.tiny import agreeable_model, random_tokens

CHECKPOINT = Path(model_package.__path__[0]) / "checkpoint"
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
NEW = 24


@pytest.fixture(scope="module")
def trained() -> tuple[Qwen4ExpForCausalLM, list[int]]:
    """The shipped model and a text; a tiny model and random tokens where none is shipped."""
    if not (CHECKPOINT / "config.json").is_file():
        return agreeable_model(seed=3), random_tokens(400, 1)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    return Qwen4ExpForCausalLM.from_pretrained(CHECKPOINT), tokens[:400]


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_output_equals_plain_greedy_decoding(
    trained: tuple[Qwen4ExpForCausalLM, list[int]], num_draft_tokens: int
) -> None:
    model, text = trained
    prompts = [text[:100], text[100:104], text[150:199]]

    def decode(k: int) -> tuple[list[list[int]], list[int]]:
        config = DecoderConfig("fp32", num_draft_tokens=k, prefill_chunk=48, max_length=160, max_requests=3)
        generations, _ = generate(SpeculativeDecoder(model, config), prompts, NEW)
        return [g.tokens for g in generations], [count for g in generations for count in g.accepted]

    plain, _ = decode(0)
    tokens, accepted = decode(num_draft_tokens)
    assert tokens == plain
    assert {0} < set(accepted), "a trained head is right at times, and wrong at times"


def test_calibrated_e4m3_accepts_about_as_much_as_fp16(
    trained: tuple[Qwen4ExpForCausalLM, list[int]],
) -> None:
    model, text = trained
    prefixes = list(range(100, 400, 20))
    scales = calibrate_scales(model, [text[:100]])
    accepted = {}
    for kv_format in ("fp16", "e4m3"):
        config = DecoderConfig(kv_format, scales=scales, max_length=400)
        result = measure_rounds(SpeculativeDecoder(model, config), [text], prefixes)
        accepted[kv_format] = float(result.accepted.double().mean())
    assert accepted["fp16"] > 0.2
    assert abs(accepted["e4m3"] - accepted["fp16"]) <= 0.6, "a broken scale costs far more, even in 15 rounds"
