"""A checkpoint, a corpus and evaluation texts for the tests of calibration, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from page4.experiments.calibrate import CalibrateConfig
from tests.experiments.acceptance.tiny_study import write_checkpoint, write_texts


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("corpus"), first=300, second=170)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("prompts"), held=300)


@pytest.fixture(scope="session")
def tiny(checkpoint: Path, corpus: Path, prompts: Path) -> Any:
    """Builds configurations of calibrations that take a second: 3 and 2 windows of at most 128 tokens."""

    def build(**changes: Any) -> CalibrateConfig:
        values: dict[str, Any] = {
            "model": checkpoint,
            "corpus": corpus,
            "prompts": prompts,
            "device": "cpu",
            "window": 128,
            "prefill_chunk": 64,
        }
        return CalibrateConfig(**(values | changes))

    return build
