"""Under the interpreter a linear layer has fewer heads than the public model's, a vocabulary fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from page4.experiments import gated_delta_cases, verify_cases


@pytest.fixture(autouse=True, scope="session")
def few_heads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(gated_delta_cases, "KEY_HEADS", 1)
            patch.setattr(gated_delta_cases, "VALUE_HEADS", 3)
            patch.setattr(verify_cases, "VOCABULARY", 3000)
        yield
