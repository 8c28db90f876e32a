"""A checkpoint with two sparse layers, texts and a configuration for the tests of the study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from page4.experiments.quant_error import QuantErrorConfig
from tests.experiments.acceptance.tiny_study import write_checkpoint, write_texts

Tiny = Callable[..., QuantErrorConfig]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "full_attention"],
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("corpus"), third=120)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), first=300, second=400)


@pytest.fixture(scope="session")
def tiny(checkpoint: Path, corpus: Path, texts: Path) -> Any:
    """Builds configurations that take a second: two lengths, two prompts, four arms."""

    def build(**changes: Any) -> QuantErrorConfig:
        values: dict[str, Any] = {
            "model": checkpoint,
            "prompts": texts,
            "corpus": corpus,
            "device": "cpu",
            "formats": ("fp16", "e4m3", "int8"),
            "rules": ("max", "percentile"),
            "percent": 90.0,
            "lengths": (48, 96),
            "num_prompts": 2,
            "scored_tokens": 20,
            "first_bucket": 32,
            "selection_stride": 3,
            "prefill_chunk": 100,
            "calibration_window": 64,
            "resamples": 200,
        }
        return QuantErrorConfig(**(values | changes))

    return build
