"""Prompts through a Gated DeltaNet layer: the kernels' chunks against the reference, whole and in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from page4.kernels.gated_delta_chunk_triton import CHUNK
from page4.kvcache.recurrent import ConvSlots, GatedDeltaSlots
from page4.model import RowBatch, Segment
from page4.model.gated_delta_net import GatedDeltaNet
from tests.oracle.tiny import tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A GPU sums products of TF32 parts, an interpreter FP32 numbers.
TOLERANCE = 1e-4 if DEVICE.type == "cuda" else 1e-5
ROWS = 3  # of a verify step
PROMPT = CHUNK + 9


@pytest.fixture(scope="module")
def layer() -> GatedDeltaNet:
    model = tiny_model(seed=2).to(DEVICE)
    return next(module for module in model.modules() if isinstance(module, GatedDeltaNet))


def new_slots(layer: GatedDeltaNet) -> GatedDeltaSlots:
    channels = sum(layer.split)
    conv = ConvSlots(2, ROWS, 3, channels, torch.float32, DEVICE)
    return GatedDeltaSlots(2, ROWS, layer.value_heads, layer.key_dim, layer.value_dim, conv, DEVICE)


def run(layer: GatedDeltaNet, backend: str, x: Tensor, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Outputs and states of request 1: pieces of a prompt, each beside request 0's, then a verify step."""
    layer.backend = backend  # type: ignore[assignment]
    slots, parts, start = new_slots(layer), [], 0
    for length, decode in [*((piece, False) for piece in pieces), (ROWS, True)]:
        ids = torch.zeros(length, dtype=torch.int64)
        segments = [Segment(1, start, ids, (0, 0), decode)]
        own = x[start : start + length]
        if not decode:  # sorted first, as it is shorter
            segments.append(Segment(0, 0, ids[:5], (0, 0), False))
            slots.reset(0)
            own = torch.cat((x[:5], own))
        parts.append(layer(own, RowBatch.pack(segments, DEVICE), slots)[-length:])
        start += length
    return torch.cat(parts), slots.state[1]


@torch.no_grad()
def test_a_prompt_in_any_pieces_is_what_the_reference_makes_of_it(layer: GatedDeltaNet) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROMPT + ROWS, layer.in_proj_qkv.in_features, generator=generator).to(DEVICE)
    expected, state = run(layer, "reference", x, [PROMPT])
    whole, whole_state = run(layer, "triton", x, [PROMPT])
    torch.testing.assert_close(whole, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(whole_state, state, rtol=TOLERANCE, atol=TOLERANCE)
    for pieces in ([CHUNK, 9], [6, PROMPT - 6]):
        actual, last = run(layer, "triton", x, pieces)
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(last, state, rtol=TOLERANCE, atol=TOLERANCE)
