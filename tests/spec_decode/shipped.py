"""The shipped model on a GPU, and the held-out texts, for tests at full size."""

from __future__ import annotations

import pytest
import torch

from page4.experiments.info import CHECKPOINT
from page4.experiments.prompt_windows import SHIPPED, load_texts
from page4.experiments.tokenizer import load_tokenizer
from page4.model import Qwen4ExpForCausalLM

on_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and (CHECKPOINT / "config.json").is_file()),
    reason="needs a GPU and the shipped checkpoint",
)


def shipped_model() -> Qwen4ExpForCausalLM:
    """In FP32: batches of other sizes sum in another order, which decides nothing there."""
    return Qwen4ExpForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, device="cuda")


def shipped_texts() -> list[list[int]]:
    """Token ids of the held-out texts."""
    tokenizer = load_tokenizer(CHECKPOINT)
    return [text.tokens for text in load_texts(SHIPPED, lambda text: list(tokenizer.encode(text).ids))]
