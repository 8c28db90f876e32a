"""The forms of the routed experts compute one sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from page4.model.moe import MoE
from tests.oracle.tiny import tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layer(experts: int, top_k: int) -> MoE:
    model = tiny_model(num_experts=experts, num_experts_per_tok=top_k).to(DEVICE)
    moe = model.model.layers[0].mlp
    assert isinstance(moe, MoE)
    return moe


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (16, 3), (64, 10), (3, 3)])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("count", [1, 4, 8, 33])
def test_a_step_that_never_waits_computes_what_a_prefill_does(
    experts: int, top_k: int, renormalise: bool, count: int
) -> None:
    """With weights of the chosen experts, or with all of them, as their numbers suggest."""
    moe, x = layer(experts, top_k), rows(count)
    moe.renormalise = renormalise
    expected = moe(x)
    assert torch.equal(moe(x, decode=True), expected), "the reference knows one form"
    moe.backend = "triton"
    assert (moe(x, decode=True) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(moe(x), expected), "prefill stays as it is"


@pytest.mark.parametrize("count", [1, 9])
def test_an_expert_that_is_not_chosen_contributes_nothing(count: int) -> None:
    """Even where its product would be infinite or no number."""
    moe, x = layer(16, 2), rows(1).expand(count, -1).contiguous()  # 9 rows choose 18 times: by all experts
    moe.backend = "triton"
    expected = moe(x, decode=True)
    chosen = moe.router_probabilities(x[:1]).topk(2).indices
    for expert in range(16):
        if expert not in chosen:
            moe.experts.down_proj[expert] = torch.nan
    assert torch.equal(moe(x, decode=True), expected)


def test_a_prefill_sums_what_single_rows_give() -> None:
    """However rows are sorted by expert; and no rows give none."""
    moe, x = layer(16, 3), rows(33)
    alone = torch.cat([moe(row) for row in x.split(1)])
    assert (moe(x) - alone).abs().max() <= 1e-5 * alone.abs().max()
    assert moe(x[:0]).shape == (0, 48)
