"""A study small enough for a test: a tiny checkpoint, two texts, and a configuration that takes a second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from page4.experiments.acceptance import AcceptanceConfig
from tests.oracle.tiny import agreeable_model, tiny_dict

WORDS = ("the", "a", "cat", "dog", "sees", "runs", "sleeps", "and", "near", "old", "small", "under", "quick")
LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "ple_layer_ids": [1],
}
"""One layer of each kind: a study is about what is measured, not about depth."""


def write_checkpoint(folder: Path, **overrides: Any) -> Path:
    """A random tiny model, whose drafts are accepted now and then, with one token per character."""
    folder.mkdir(parents=True, exist_ok=True)
    overrides = LAYERS | overrides
    model = agreeable_model(seed=3, **overrides)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(tiny_dict(**overrides)), encoding="utf-8")
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {"<unk>": 0} | {character: index + 1 for index, character in enumerate(characters)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_texts(folder: Path, **lengths: int) -> Path:
    """Texts of random words by name; the length is in characters, which are tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, length in lengths.items():
        words = random.Random(name)
        text = ""
        while len(text) < length:
            text += words.choice(WORDS) + " "
        (folder / f"{name}.txt").write_text(text[:length], encoding="utf-8")
    return folder


def tiny_config(checkpoint: Path, texts: Path, **changes: Any) -> AcceptanceConfig:
    """Two lengths, four prompts in two batches, three rounds."""
    values: dict[str, Any] = {
        "arms": (("fp16", "fp16", "fp16", 0), ("e4m3", "e4m3", "e4m3", 0), ("fp16_again", "fp16", "fp16", 1)),
        "model": checkpoint,
        "prompts": texts,
        "device": "cpu",
        "lengths": (48, 96),
        "num_prompts": 4,
        "prompt_tokens": 0,
        "batch_size": 2,
        "rounds_per_prompt": 3,
        "round_stride": 5,
        "prefill_chunk": 64,
        "calibration_tokens": 40,
        "generation_prompts": 1,
        "generation_max_length": 0,
        "generation_tokens": 6,
        "check_prompts": 1,
        "resamples": 200,
    }
    return AcceptanceConfig(**(values | changes))
