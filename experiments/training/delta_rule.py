"""The chunked gated delta rule of a training step: fla's kernels on a GPU, the PyTorch reference on a CPU.

fla-core 0.6.0's ``chunk_bwd_dqkwg`` gives wrong gradients on Hopper with Triton 3.6 and refuses to run there,
so that one kernel is replaced by the batched matrix products below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from page4.experiments.training.compiled import rowwise
from page4.kernels.errors import InputError
from page4.kernels.gated_delta import chunk_gated_delta_reference

_fla_rule: Any = None


@rowwise
def chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    g: Tensor,
    dv: Tensor,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a chunk's output ``scale (exp2(g) q h + tril(exp2(g_i - g_j) q k^T) v)`` and last state.

    Shapes: ``q, k, v, do, dv [B, T, H, D]``, ``h, dh [B, T/chunk, H, Dk, Dv]``, ``g [B, T, H]``, the running
    sum of the log2 decay within each chunk. Returns dq, dk, dw and dg, the last by the natural-log decay.
    """
    batch, length, heads, _ = q.shape
    dtype = q.dtype

    def split(x: Tensor) -> Tensor:  # [B, T, H, D] -> [B, T/C, H, C, D]
        return x.reshape(batch, length // chunk, chunk, heads, -1).transpose(2, 3)

    def join(x: Tensor) -> Tensor:
        return x.transpose(2, 3).reshape(batch, length, heads, -1)

    q_, k_, v_, do_, dv_ = (split(x).to(dtype) for x in (q, k, v, do, dv))
    ht = h.reshape(batch, length // chunk, heads, q.shape[-1], -1).mT
    dht = dh.reshape(ht.shape[0], ht.shape[1], heads, q.shape[-1], -1).mT
    decay = split(g.float().unsqueeze(-1)).squeeze(-1)  # [B, T/C, H, C]
    last = decay[..., -1:]
    d_last = (ht.float() * dht.float()).sum((-1, -2)) * last[..., 0].exp2()

    dq = (do_ @ ht.to(dtype)).float() * decay.exp2().unsqueeze(-1) * scale
    dk = (v_ @ dht.to(dtype)).float() * (last - decay).exp2().unsqueeze(-1)
    dw = -(dv_ @ ht.to(dtype))
    d_last = d_last + (dk * k_.float()).sum((-1, -2))

    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    relative = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, -1e4).exp2()
    ds = ((do_ @ v_.mT).float() * relative * scale).to(dtype)
    dq = dq + (ds @ k_).float()
    dk = dk + (ds.mT @ q_).float()
    dg = (dq * q_.float()).sum(-1) - (dk * k_.float()).sum(-1)
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + d_last.unsqueeze(-1)], -1)
    return join(dq).to(dtype), join(dk).to(dtype), join(dw).to(dtype), join(dg.unsqueeze(-1)).squeeze(-1)


def _replacement(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert g is not None and dv is not None
    if state_v_first:
        h, dh = h.mT, dh.mT
    with torch.autocast(q.device.type, enabled=False):
        return chunk_backward(q, k, v, do, h, dh, g, dv, scale or q.shape[-1] ** -0.5, chunk_size)


def _fla() -> Any:
    """fla's ``chunk_gated_delta_rule`` with the broken kernel replaced.

    Raises:
        InputError: fla-core is not installed.
    """
    global _fla_rule
    if _fla_rule is None:
        try:
            import fla.ops.gated_delta_rule.chunk as chunk
        except ImportError as error:
            raise InputError("training on a GPU needs fla-core: pip install fla-core==0.6.0") from error
        chunk.chunk_bwd_dqkwg = _replacement
        _fla_rule = chunk.chunk_gated_delta_rule
    return _fla_rule


def gated_delta_sequence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Whole sequences from an empty state.

    ``q, k [B, T, Hk, Dk]``, ``v [B, T, Hv, Dv]``, ``g, beta [B, T, Hv]``; returns ``o [B, T, Hv, Dv]`` and,
    where asked for, the final state ``[B, Hv, Dk, Dv]``.
    """
    if q.is_cuda:
        repeats = v.shape[2] // k.shape[2]
        o, state = _fla()(
            q.repeat_interleave(repeats, 2),
            k.repeat_interleave(repeats, 2),
            v.contiguous(),
            g=g,
            beta=beta.to(v.dtype),
            use_qk_l2norm_in_kernel=True,
            output_final_state=final_state,
        )
        return o, state
    empty = torch.zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3], device=q.device)
    o, state = chunk_gated_delta_reference(q, k, v, g, beta, empty)
    return o.to(v.dtype), state if final_state else None
