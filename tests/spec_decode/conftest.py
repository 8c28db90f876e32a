"""Models and decoders for the tests of speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest
import torch

from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import DecoderConfig, Request, SpeculativeDecoder
from page4.spec_decode.engine import StepInFlight
from tests.kvcache.accounting import accounting
from tests.oracle.tiny import agreeable_model
from tests.spec_decode.reference import continuation

__all__ = ["accounting"]

Build = Callable[..., SpeculativeDecoder]


class Forcing(Protocol):
    """See :func:`force_drafts`."""

    def __call__(
        self, prompts: Sequence[tuple[int, ...]], right: Callable[[int], int], wrong: int | None = None
    ) -> None: ...


@pytest.fixture(scope="session")
def model() -> Qwen4ExpForCausalLM:
    """Accepts any number of drafts from 0 to K now and then."""
    return agreeable_model(seed=3)


@pytest.fixture(scope="session")
def decoder(model: Qwen4ExpForCausalLM) -> Build:
    """Builds FP32 decoders."""
    defaults: dict[str, Any] = {"kv_format": "fp32", "max_length": 128, "prefill_chunk": 16}

    def build(num_draft_tokens: int = 3, **options: Any) -> SpeculativeDecoder:
        options = defaults | options
        return SpeculativeDecoder(model, DecoderConfig(num_draft_tokens=num_draft_tokens, **options))

    return build


@pytest.fixture
def force_drafts(model: Qwen4ExpForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Forcing:
    """Makes drafts right up to a chosen position and wrong there.

    The draft layer runs all the same; what it proposes is replaced by the greedy continuation, with draft
    number ``right(step)`` (from 0) corrupted or ``wrong``. Exactly that many drafts are accepted in
    verification number ``step``.
    """

    def force(
        prompts: Sequence[tuple[int, ...]], right: Callable[[int], int], wrong: int | None = None
    ) -> None:
        original = SpeculativeDecoder.collect
        known = {prompt: continuation(model, prompt, 40) for prompt in prompts}

        def collect(self: SpeculativeDecoder, step: StepInFlight) -> dict[Request, list[int]]:
            emitted = original(self, step)
            for request in emitted:
                future = known[tuple(request.tokens[: request.prompt_length])]
                done = len(request.emitted)
                proposal = future[done : done + self.config.num_draft_tokens]
                bad = right(len(request.accepted))
                if bad < len(proposal):
                    proposal[bad] = (proposal[bad] + 1) % model.config.vocab_size if wrong is None else wrong
                self.state.drafts[request.row] = torch.tensor(proposal)
            return emitted

        monkeypatch.setattr(SpeculativeDecoder, "collect", collect)

    return force
