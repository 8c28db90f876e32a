"""Mixture of experts with one shared expert."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from page4.kernels.backend import Backend

from .config import Qwen4ExpConfig
from .weights import projection


class Experts(nn.Module):
    """Fused routed experts: ``gate_up_proj [E, 2I, H]`` (gate rows first) and ``down_proj [E, H, I]``."""

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(
            torch.randn(experts, 2 * intermediate, hidden) * 0.5 / math.sqrt(hidden)
        )
        self.down_proj = nn.Parameter(
            torch.randn(experts, hidden, intermediate) * 0.1 / math.sqrt(intermediate)
        )


class SharedExpert(nn.Module):
    """SwiGLU expert that sees every row."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = projection(intermediate, hidden)
        self.up_proj = projection(intermediate, hidden)
        self.down_proj = projection(hidden, intermediate, gain=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Rows ``[N, H]`` to ``[N, H]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """``y = sum_topk w_e expert_e(x) + sigmoid(g . x) shared(x)``.

    The router's softmax is in FP32, its top-k weights are renormalised. Rows are sorted by expert, which
    needs the experts' counts on the host; the decode steps of the ``triton`` backend never wait for the
    device, and multiply gathered weights or all of them instead.
    Source: Qwen4Exp reference implementation (transformers).
    """

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        self.backend: Backend = "reference"
        self.top_k = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        hidden = config.hidden_size
        self.gate = projection(config.num_experts, hidden, gain=0.02 * math.sqrt(hidden))
        self.experts = Experts(config.num_experts, hidden, config.moe_intermediate_size)
        self.shared_expert = SharedExpert(hidden, config.shared_expert_intermediate_size)
        self.shared_expert_gate = projection(1, hidden, gain=0.02 * math.sqrt(hidden))

    def router_probabilities(self, x: Tensor) -> Tensor:
        """Softmax over all experts, FP32: ``[N, H] -> [N, E]``."""
        return F.softmax(self.gate(x).float(), dim=-1)

    def shared(self, x: Tensor) -> Tensor:
        """The gated shared expert, ``[N, H] -> [N, H]``."""
        return torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)

    def forward(self, x: Tensor, decode: bool = False) -> Tensor:
        """``[N, H] -> [N, H]``; ``decode`` says that all rows are those of decode steps."""
        if self.backend == "triton" and decode:
            return self._without_waiting(x)
        weights, chosen = self.router_probabilities(x).topk(self.top_k, dim=-1)  # [N, k]
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        # One sort instead of a comparison per expert; rows of one expert become one contiguous product.
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.gate.weight.shape[0]).tolist()
        gate, up = _each_expert(x[order // self.top_k], self.experts.gate_up_proj, counts).chunk(2, dim=-1)
        sorted_outputs = _each_expert(F.silu(gate) * up, self.experts.down_proj, counts)
        outputs = torch.empty_like(sorted_outputs).index_copy(0, order, sorted_outputs)
        routed = (outputs.view(*chosen.shape, x.shape[-1]) * weights.to(x.dtype).unsqueeze(-1)).sum(1)
        return routed + self.shared(x)

    def _without_waiting(self, x: Tensor) -> Tensor:
        """The same with products whose shapes do not depend on who chose what."""
        from page4.kernels.moe_triton import combine_triton, route_triton, swiglu_triton  # see Step.kernels

        weights, chosen = route_triton(self.gate(x), self.top_k, self.renormalise)
        expert = self.shared_expert
        shared = expert.down_proj(swiglu_triton(expert.gate_proj(x), expert.up_proj(x)))
        by_expert = chosen.numel() >= self.gate.weight.shape[0]
        outputs = self._all_outputs(x) if by_expert else self._chosen_outputs(x, chosen)
        return combine_triton(outputs, weights, chosen, shared, self.shared_expert_gate(x), by_expert)

    def _all_outputs(self, x: Tensor) -> Tensor:
        """Outputs of all experts ``[E, N, H]``: every weight is read once."""
        from page4.kernels.moe_triton import swiglu_triton  # see Step.kernels

        experts = self.experts.down_proj.shape[0]
        gate_up = F.linear(x, self.experts.gate_up_proj.flatten(0, 1)).view(len(x) * experts, -1)
        hidden = swiglu_triton(*gate_up.chunk(2, dim=1)).view(len(x), experts, -1)
        return torch.bmm(hidden.transpose(0, 1), self.experts.down_proj.mT)

    def _chosen_outputs(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Outputs ``[N * k, H]`` of the chosen experts, whose weights are copied, each as often as chosen."""
        from page4.kernels.moe_triton import swiglu_triton  # see Step.kernels

        expert = chosen.flatten()
        rows = x.repeat_interleave(self.top_k, dim=0).unsqueeze(-1)  # [N k, H, 1]
        gate_up = torch.bmm(self.experts.gate_up_proj[expert], rows).squeeze(-1)
        hidden = swiglu_triton(*gate_up.chunk(2, dim=1)).unsqueeze(-1)
        return torch.bmm(self.experts.down_proj[expert], hidden).squeeze(-1)


def _each_expert(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows ``[M, A]``, sorted by expert, through their expert's weight ``[E, B, A]``: ``[M, B]``."""
    parts = zip(x.split(list(counts)), weight, counts, strict=True)
    # Of no rows at all, every expert has none to give.
    return torch.cat([F.linear(part, expert) for part, expert, count in parts if count or not len(x)])
