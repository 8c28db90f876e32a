"""The MTP head computes what the same head made of transformers' modules computes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kvcache import HybridCache
from page4.model import RowBatch, Segment
from tests.oracle.hf_mtp import MTPRunner
from tests.oracle.hf_reference import SAFE_MARGIN, lower_index_first
from tests.oracle.pairs import CONFIGS, Pair, pair
from tests.oracle.steps import exact_cache
from tests.oracle.tiny import tiny_model

TOLERANCE = 1e-4
ROWS = 60  # row p knows the token after it

every_config = pytest.mark.parametrize("name", CONFIGS)


class OurMTP:
    """Draft steps of one request with our cache."""

    def __init__(self, p: Pair) -> None:
        self.model = p.ours
        self.cache: HybridCache = exact_cache(p.ours)
        self.request = self.cache.open()
        self.position = 0

    def step(self, tokens: list[int], streams: Tensor, decode: bool = False) -> tuple[Tensor, Tensor]:
        """Streams and draft logits of the next rows."""
        self.cache.reserve(self.request, self.position + len(tokens))
        segment = Segment(self.request, self.position, torch.tensor(tokens), (), decode)
        out = self.model.draft_rows(RowBatch.pack([segment], self.model.device), streams, self.cache)
        self.position += len(tokens)
        return out, self.model.draft_logits(out)


def both(p: Pair) -> tuple[OurMTP, MTPRunner]:
    return OurMTP(p), MTPRunner(p.hf, p.hf_mtp)


def assert_equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert (our - their).abs().max() <= TOLERANCE


@every_config
def test_step_0_over_a_prompt(name: str) -> None:
    p = pair(name)
    ours, theirs = both(p)
    following, streams = p.tokens[1:], p.reference.streams[:ROWS]
    with lower_index_first(p.hf_mtp) as margins:
        expected = theirs.step(following, streams)
    assert min(margins) > SAFE_MARGIN, "choose other weights: rounding may change the selection"
    assert_equal(ours.step(following, streams), expected)


@every_config
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_step_0_in_chunks(name: str, decode: bool) -> None:
    p = pair(name)
    ours, theirs = both(p)
    with lower_index_first(p.hf_mtp):
        expected = theirs.step(p.tokens[1:], p.reference.streams[:ROWS])
    cuts = [0, 17, 18, 22, 26, 27, 35, 43, 51, ROWS]
    parts = [
        ours.step(p.tokens[a + 1 : b + 1], p.reference.streams[a:b], decode=decode and b - a <= 8)
        for a, b in pairwise(cuts)
    ]
    streams, logits = (torch.cat(both_parts) for both_parts in zip(*parts, strict=True))
    assert_equal((streams, logits), expected)


@every_config
def test_recursion_feeds_the_heads_own_streams_back(name: str) -> None:
    """Steps 1 to K-1 take the drafted token and the head's streams; the next step 0 rewrites their rows."""
    p = pair(name)
    ours, theirs = both(p)
    draft_tokens = 6
    with lower_index_first(p.hf_mtp):
        for start, stop in ((0, 33), (33, 35), (35, 36), (36, 43), (43, ROWS)):
            rows = p.tokens[start + 1 : stop + 1], p.reference.streams[start:stop]
            our, their = ours.step(*rows), theirs.step(*rows)
            assert_equal(our, their)
            for _ in range(draft_tokens - 1):
                token = [int(their[1][-1].argmax())]
                our, their = ours.step(token, our[0][-1:], decode=True), theirs.step(token, their[0][-1:])
                assert_equal(our, their)
            ours.position -= draft_tokens - 1
            theirs.forget(draft_tokens - 1)


def test_every_weight_of_the_head_matters_to_the_comparison() -> None:
    p = pair("base")
    rows = p.tokens[1:], p.reference.streams[:ROWS]
    expected = OurMTP(p).step(*rows)[1]
    head = p.ours.mtp
    assert head is not None
    idle = []
    for name, parameter in head.named_parameters():
        original = parameter.clone()
        parameter.copy_(original.roll(1, dims=-1))
        if (OurMTP(p).step(*rows)[1] - expected).abs().max() < 10 * TOLERANCE:
            idle.append(name)
        parameter.copy_(original)
    assert not idle


def test_a_model_without_the_head_refuses_to_draft() -> None:
    model = tiny_model(mtp_num_hidden_layers=0)
    cache = exact_cache(model)
    batch = RowBatch.pack([Segment(cache.open(), 0, torch.tensor([1]), (), False)], model.device)
    with pytest.raises(InputError, match="no MTP head: set num_draft_tokens to 0"):
        model.draft_rows(batch, torch.zeros(1, model.config.stream_size), cache)
