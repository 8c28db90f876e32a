"""One tiny model for all cache tests."""

from __future__ import annotations

import pytest

from page4.model import Qwen4ExpForCausalLM
from tests.kvcache.accounting import accounting
from tests.oracle.tiny import tiny_model

__all__ = ["accounting"]


@pytest.fixture(scope="session")
def model() -> Qwen4ExpForCausalLM:
    return tiny_model(seed=2, ple_layer_ids=[1, 2])
