"""The forms of the routed experts compute one sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from page4.model.moe import MoE
from tests.oracle.tiny import tiny_model


def layer(experts: int, top_k: int) -> MoE:
    model = tiny_model(num_experts=experts, num_experts_per_tok=top_k)
    moe = model.model.layers[0].mlp
    assert isinstance(moe, MoE)
    return moe


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (16, 3), (64, 10), (3, 3)])
@pytest.mark.parametrize("count", [1, 4, 8, 33])
def test_a_step_that_never_waits_computes_what_a_prefill_does(experts: int, top_k: int, count: int) -> None:
    moe, x = layer(experts, top_k), rows(count)
    expected = moe(x, decode=True)  # on the reference backend, sorted
    weights, chosen = moe.router_probabilities(x).topk(top_k, dim=-1)
    routed = moe.sorted_experts(x, weights, chosen)
    for form in (moe.gathered_experts, moe.all_experts):
        assert (form(x, weights, chosen) - routed).abs().max() <= 1e-5 * routed.abs().max()
    moe.backend = "triton"
    assert (moe(x, decode=True) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(moe(x), expected), "prefill stays as it is"


def test_the_steps_of_the_kernels_never_ask_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking would wait for the device."""
    moe = layer(6, 2)
    moe.backend = "triton"
    monkeypatch.setattr(Tensor, "tolist", None)
    monkeypatch.setattr(Tensor, "item", None)
    moe(rows(1), decode=True)
    moe(rows(9), decode=True)
    with pytest.raises(TypeError):
        moe(rows(9))


def test_an_expert_that_is_not_chosen_contributes_nothing() -> None:
    """Even where its product would be infinite or no number."""
    moe, x = layer(6, 2), rows(7)
    weights, chosen = moe.router_probabilities(x).topk(2, dim=-1)
    unused = next(e for e in range(6) if e not in chosen[:1])
    expected = moe.sorted_experts(x[:1], weights[:1], chosen[:1])
    moe.experts.down_proj[unused] = torch.nan
    actual = moe.all_experts(x[:1], weights[:1], chosen[:1])
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
