"""A checkpoint of two sparse layers and texts for the tests of the study, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.acceptance.tiny_study import write_checkpoint, write_texts


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), **layers)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), first=300, second=400)
