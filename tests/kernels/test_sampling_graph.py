"""Verification and draft sampling in CUDA graphs: replayed on other logits, they do as eager calls do."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from page4.experiments.kernel_cases import StepShape
from page4.experiments.verify_cases import VOCABULARY, Choice, VerifyInputs, verify_copies
from page4.kernels.draft_sampling import DraftDistributions
from page4.kernels.draft_sampling_triton import DraftWorkspace, sample_drafts_triton
from page4.kernels.mtp_verify_triton import verify_triton

from .test_graph_capture import capture, without_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
SHAPE = StepShape(
    requests=6, rows=4, query_heads=4, kv_heads=2, context=70, overlap=0.5, kv_format="e4m3", topk=8
)


def change(inputs: VerifyInputs, others: VerifyInputs) -> None:
    """The others' values in the memory of ``inputs``, and marks where results belong."""
    for name in ("logits", "drafts", "positions"):
        getattr(inputs, name).copy_(getattr(others, name))
    if inputs.distributions is not None and others.distributions is not None:
        for name, x in vars(inputs.distributions).items():
            x.copy_(getattr(others.distributions, name))
    inputs.accepted.fill_(-7)
    inputs.emitted.fill_(-7)


@pytest.mark.parametrize("choice", get_args(Choice))
def test_a_replayed_verification_equals_the_eager_one(choice: Choice) -> None:
    inputs, *others = verify_copies(SHAPE, "cuda", copies=4, choice=choice)
    others[1].positions[2] = -1  # a padded request

    def launch() -> None:
        verify_triton(**vars(inputs))

    launch()  # compiles
    with without_waiting():
        launch()
    graph = capture(launch)
    results = set()
    for other in (*others, others[0]):
        change(inputs, other)
        launch()
        eager = inputs.accepted.clone(), inputs.emitted.clone()
        change(inputs, other)
        graph.replay()
        assert torch.equal(inputs.accepted, eager[0]) and torch.equal(inputs.emitted, eager[1])
        assert ((inputs.accepted == -7) == (inputs.positions < 0)).all()
        results.add(tuple(inputs.emitted.flatten().tolist()))
    assert len(results) == len(others)


@pytest.mark.parametrize("choice", ["greedy", "filtered"])
def test_a_replayed_draft_equals_the_eager_one(choice: Choice) -> None:
    inputs, *others = verify_copies(SHAPE, "cuda", copies=3, choice=choice)
    logits = inputs.logits[:, 0]
    workspace = DraftWorkspace.allocate(SHAPE.requests, VOCABULARY, "cuda")
    store = DraftDistributions.empty(logits, 2)
    out = torch.full((SHAPE.requests,), -7, device="cuda")

    def launch() -> None:
        sample_drafts_triton(logits, inputs.positions, inputs.params, workspace, store, step=1, out=out)

    launch()  # compiles
    with without_waiting():
        launch()
    graph = capture(launch)
    for other in others:
        change(inputs, other)
        launch()
        eager = [out.clone(), *(x[:, 1].clone() for x in vars(store).values())]
        for x in (out, *vars(store).values()):
            x.fill_(-7)
        graph.replay()
        replayed = [out, *(x[:, 1] for x in vars(store).values())]
        if choice == "greedy":  # such a draft's logits are not stored
            del eager[1], replayed[1]
        assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
