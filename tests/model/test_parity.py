"""The model computes what transformers' Qwen4Exp computes, whatever the steps in which the tokens arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from page4.model import Qwen4ExpConfig, Qwen4ExpForCausalLM
from tests.oracle.hf_reference import hf_model, run, safe_tokens
from tests.oracle.pairs import CONFIGS, config_values, pair, tokens_with_eos
from tests.oracle.steps import Stepper

TOLERANCE = 1e-4  # max |dlogit| in float32; logits reach 10 to 20

every_config = pytest.mark.parametrize("name", CONFIGS)


def in_chunks(step: Callable[[list[int]], Tensor], tokens: list[int], size: int) -> Tensor:
    """Results of steps of ``size`` tokens (the last may be shorter), one after the other."""
    return torch.cat([step(tokens[i : i + size]) for i in range(0, len(tokens), size)])


def assert_parity(name: str, streams: Tensor) -> None:
    expected = pair(name).reference
    logits = pair(name).ours.logits(streams)
    assert (streams - expected.streams).abs().max() <= TOLERANCE
    assert (logits - expected.logits).abs().max() <= TOLERANCE


@every_config
def test_full_forward(name: str) -> None:
    p = pair(name)
    output = p.ours(torch.tensor([p.tokens]))
    assert output.logits.shape == (1, len(p.tokens), p.ours.config.vocab_size)
    assert (output.logits[0] - p.reference.logits).abs().max() <= TOLERANCE
    assert (output.streams[0] - p.reference.streams).abs().max() <= TOLERANCE


@every_config
@pytest.mark.parametrize("size", [13, 16])
def test_chunked_prefill(name: str, size: int) -> None:
    p = pair(name)
    assert_parity(name, in_chunks(Stepper(p.ours).prefill, p.tokens, size))


@every_config
def test_token_by_token(name: str) -> None:
    p = pair(name)
    assert_parity(name, in_chunks(Stepper(p.ours).decode, p.tokens, 1))


@every_config
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
def test_verify_rows_after_a_prefill(name: str, num_draft_tokens: int) -> None:
    p = pair(name)
    stepper = Stepper(p.ours)
    prompt = stepper.prefill(p.tokens[:29])
    assert_parity(name, torch.cat([prompt, in_chunks(stepper.decode, p.tokens[29:], num_draft_tokens + 1)]))


def test_single_token_prefill_chunks_are_not_taken_for_decode_steps() -> None:
    p = pair("base")
    assert_parity("base", in_chunks(Stepper(p.ours).prefill, p.tokens, 1))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 19, 20, 21])
def test_short_sequences_and_the_edge_of_the_budget(length: int) -> None:
    """The first row that must choose among blocks is number budget + ratio - 1."""
    p = pair("base")
    tokens = p.tokens[:length]
    difference = p.ours(torch.tensor([tokens])).logits[0] - run(p.hf, tokens).logits
    assert difference.abs().max() <= TOLERANCE


def test_sparse_and_dense_attention_part_where_the_budget_ends() -> None:
    p = pair("base")
    dense = Qwen4ExpForCausalLM(Qwen4ExpConfig.from_dict(config_values("context_within_budget")))
    dense.load_state_dict(p.ours.state_dict())
    tokens = torch.tensor([p.tokens])
    difference = (dense(tokens).logits - p.ours(tokens).logits)[0].abs().amax(-1)
    assert difference[:19].max() <= TOLERANCE
    assert difference[19:].max() > 100 * TOLERANCE


def test_a_long_prompt_that_spans_many_pages_and_delta_chunks() -> None:
    p = pair("base")
    tokens, expected = safe_tokens(p.hf, lambda seed: tokens_with_eos(1000 + seed, 150))
    stepper = Stepper(p.ours)
    logits = p.ours.logits(torch.cat([stepper.prefill(tokens[:100]), stepper.prefill(tokens[100:])]))
    assert (logits - expected.logits).abs().max() <= TOLERANCE


def test_every_weight_matters_to_the_comparison() -> None:
    """Parity means something only if an error in any one tensor would show."""
    p = pair("base")
    tokens = torch.tensor([p.tokens])
    expected = p.ours(tokens).logits
    idle = []
    for name, parameter in p.ours.named_parameters():
        if name.startswith("mtp."):
            continue
        original = parameter.clone()
        parameter.copy_(original.roll(1, dims=-1))  # norms hide a mere factor
        if (p.ours(tokens).logits - expected).abs().max() < 10 * TOLERANCE:
            idle.append(name)
        parameter.copy_(original)
    assert not idle


def test_the_oracle_notices_a_wrong_weight() -> None:
    values = config_values("base")
    p = pair("base")
    other = run(hf_model(values, seed=3), p.tokens)
    assert (other.logits - p.reference.logits).abs().max() > 1
