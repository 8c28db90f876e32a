"""Inputs of verification and of recurrent layers: as models have them, and able to tell right from wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from page4.experiments import gated_delta_cases, verify_cases
from page4.experiments.gated_delta_cases import (
    delta_bytes,
    delta_copies,
    delta_inputs,
    delta_memory,
    prompt_bytes,
    prompt_copies,
    prompt_inputs,
    prompt_memory,
)
from page4.experiments.kernel_cases import StepShape
from page4.experiments.verify_cases import Choice, verify_bytes, verify_copies, verify_inputs, verify_memory
from page4.kernels.mtp_verify import verify_reference

SHAPE = StepShape(
    requests=5, rows=4, query_heads=4, kv_heads=2, context=70, overlap=0.5, kv_format="e4m3", topk=8
)


@pytest.fixture(autouse=True)
def few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KEY_HEADS": 1, "VALUE_HEADS": 2, "HEAD_DIM": 16}.items():
        monkeypatch.setattr(gated_delta_cases, name, value)
    monkeypatch.setattr(verify_cases, "VOCABULARY", 3000)


def tensors(inputs: Any) -> Iterator[Tensor]:
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from tensors(value)


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("kind", ["delta", "prompt", "greedy", "sampled", "filtered"])
def test_inputs_without_values_look_like_those_with(kind: Any, rows: int) -> None:
    shape = replace(SHAPE, rows=rows)
    if kind == "delta":
        hollow: Any = delta_inputs(shape)
        copies: list[Any] = [*delta_copies(shape, "cpu", copies=2)]
    elif kind == "prompt":
        hollow = prompt_inputs(shape.requests, rows)
        copies = [*prompt_copies(shape, "cpu", copies=2)]
    else:
        hollow = verify_inputs(shape, choice=kind)
        copies = [*verify_copies(shape, "cpu", copies=2, choice=kind)]
    looks = [(x.shape, x.stride(), x.dtype) for x in tensors(hollow)]
    for copy in copies:
        assert [(x.shape, x.stride(), x.dtype) for x in tensors(copy)] == looks


@pytest.mark.parametrize("choice", get_args(Choice))
def test_copies_differ_and_a_seed_repeats_them(choice: Choice) -> None:
    first, second = verify_copies(SHAPE, "cpu", seed=1, copies=2, choice=choice)
    (again,) = verify_copies(SHAPE, "cpu", seed=1, choice=choice)
    assert torch.equal(first.logits, again.logits) and torch.equal(first.drafts, again.drafts)
    assert not torch.equal(first.logits, second.logits)
    assert not torch.equal(first.drafts, second.drafts)
    assert first.workspace is second.workspace
    one, other = delta_copies(SHAPE, "cpu", seed=1, copies=2)
    assert torch.equal(one.state[:, 0], delta_copies(SHAPE, "cpu", seed=1)[0].state[:, 0])
    assert not torch.equal(one.state[:, 0], other.state[:, 0])


@pytest.mark.parametrize("choice", get_args(Choice))
def test_drafts_are_accepted_and_rejected(choice: Choice) -> None:
    shape = replace(SHAPE, requests=64)
    (inputs,) = verify_copies(shape, "cpu", choice=choice)
    accepted, emitted = verify_reference(
        inputs.logits, inputs.drafts, inputs.positions, inputs.params, inputs.distributions
    )
    assert set(accepted.tolist()) == {0, 1, 2, 3}
    assert ((inputs.params.scale == 0) == (choice == "greedy")).all()
    assert (emitted >= 0).sum() == (accepted + 1).sum()


def test_slots_that_no_step_reads_hold_nothing() -> None:
    (inputs,) = delta_copies(SHAPE, "cpu")
    assert inputs.state[:, 0].isfinite().all()
    assert inputs.state[:, 1:].isnan().all()


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_bytes_of_a_recurrent_step(rows: int) -> None:
    shape = replace(SHAPE, rows=rows)
    (inputs,) = delta_copies(shape, "cpu")
    slots = max(rows, 4)
    assert inputs.state.shape[1] == slots and inputs.ring.shape[1] == 3 + slots
    activations = [*vars(inputs.inputs).values(), inputs.out]
    memory = [*activations, inputs.state, inputs.ring]
    assert delta_memory(shape) == sum(x.nbytes for x in memory)
    # The state is read once and written for every row; of the ring three places are read, one a row written.
    moved = sum(x.nbytes for x in activations)
    moved += inputs.state[:, 0].nbytes * (1 + rows) + inputs.ring[:, 0].nbytes * (3 + rows)
    assert delta_bytes(shape) == moved


@pytest.mark.parametrize(("rows", "past"), [(70, 0), (69, 1), (5, 65)])
def test_bytes_of_a_prompt(rows: int, past: int) -> None:
    """The state in and out, whatever its length; of the ring what lies before it, and its last seven rows."""
    shape = replace(SHAPE, rows=rows)
    (inputs,) = prompt_copies(shape, "cpu")
    assert inputs.state.shape[1] == 4 and inputs.ring.shape[1] == 7
    assert inputs.rows.positions[:rows].tolist() == list(range(past, 70))
    activations = [*vars(inputs.inputs).values(), inputs.out]
    assert prompt_memory(shape) == sum(x.nbytes for x in [*activations, inputs.state, inputs.ring])
    moved = sum(x.nbytes for x in activations) + 2 * inputs.state[:, 0].nbytes
    assert prompt_bytes(shape) == moved + inputs.ring[:, 0].nbytes * (min(past, 3) + min(rows, 7))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("choice", get_args(Choice))
def test_bytes_of_a_verification(rows: int, choice: Choice) -> None:
    shape = replace(SHAPE, rows=rows)
    (inputs,) = verify_copies(shape, "cpu", choice=choice)
    drafted = inputs.distributions
    assert (drafted is not None) == (choice == "filtered" and rows > 1)
    stored = 0 if drafted is None else drafted.logits.nbytes
    read = 0 if drafted is None else drafted.logits[:, 0].nbytes
    assert verify_memory(shape, choice) == inputs.logits.nbytes + stored
    assert verify_bytes(shape, choice) == inputs.logits.nbytes + read
