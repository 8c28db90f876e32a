"""The hand-written backward pass of one chunk equals automatic differentiation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from page4.experiments.training.delta_rule import chunk_backward, gated_delta_sequence
from page4.kernels.gated_delta import chunk_gated_delta_reference

CHUNK = 8


def _forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, h: Tensor, g: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and next states of every chunk, given its first state; ``v`` is ``u - w h``."""
    length = q.shape[1]

    def split(x: Tensor) -> Tensor:
        return x.unflatten(1, (length // CHUNK, CHUNK)).transpose(2, 3)

    q_, k_, u_, w_ = (split(x) for x in (q, k, v, w))
    decay = split(g.unsqueeze(-1))  # [B, N, H, C, 1]
    v_ = u_ - w_ @ h
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    relative = (decay - decay.mT).masked_fill(~causal, -1e4).exp2()
    o = scale * ((q_ * decay.exp2()) @ h + ((q_ @ k_.mT) * relative) @ v_)
    last = decay[..., -1:, :]
    after = h * last.exp2() + (k_ * (last - decay).exp2()).mT @ v_
    return o.transpose(2, 3).flatten(1, 2), after


def test_chunk_gradients_equal_autograd() -> None:
    """h is each chunk's first state and dh the gradient that arrives at its last one."""
    generator = torch.Generator().manual_seed(0)
    batch, length, heads, dim = 2, 3 * CHUNK, 2, 4
    chunks = length // CHUNK

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    q, k, u, w = (random(batch, length, heads, dim).requires_grad_() for _ in range(4))
    h = random(batch, chunks, heads, dim, dim).requires_grad_()
    step = -random(batch, chunks, CHUNK, heads).abs() * 0.2
    g = step.cumsum(2).flatten(1, 2).detach().requires_grad_()
    scale = dim**-0.5
    do, dh = random(batch, length, heads, dim), random(batch, chunks, heads, dim, dim)

    o, after = _forward(q, k, u, w, h, g, scale)
    dq, dk, du, dw, dg = torch.autograd.grad((o * do).sum() + (after * dh).sum(), [q, k, u, w, g])

    dg = dg / math.log(2)  # g is a base-2 logarithm, fla wants the gradient of the natural one
    v = u - torch.einsum("bnchk,bnhkv->bnchv", w.unflatten(1, (chunks, CHUNK)), h).flatten(1, 2)
    got = chunk_backward(q, k, v.detach(), do, h, dh, g, du, scale, CHUNK)
    for name, ours, expected in zip(("dq", "dk", "dw", "dg"), got, (dq, dk, dw, dg), strict=True):
        torch.testing.assert_close(
            ours.detach(), expected, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fla's kernels need a GPU")
def test_fla_with_the_replacement_equals_the_reference() -> None:
    """Output and all gradients, in bf16 against the FP32 reference."""
    pytest.importorskip("fla", reason="fla is not installed")
    torch.manual_seed(0)
    shape = (2, 2048, 8, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    g = (-torch.rand(shape[:3], device="cuda") * 0.2).requires_grad_()
    beta = torch.rand(shape[:3], device="cuda").requires_grad_()
    do = torch.randn(shape, device="cuda")
    inputs = [q, k, v, g, beta]
    o, _ = gated_delta_sequence(*inputs)
    gradients = torch.autograd.grad((o.float() * do).sum(), inputs)
    empty = torch.zeros(2, 8, 64, 64, device="cuda")
    expected, _ = chunk_gated_delta_reference(*inputs, empty)
    expected_gradients = torch.autograd.grad((expected * do).sum(), inputs)
    for name, ours, theirs in zip(
        ("o", "q", "k", "v", "g", "beta"), (o, *gradients), (expected, *expected_gradients), strict=True
    ):
        error = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        assert error < 0.02, f"{name}: relative error {error:.3g}"
