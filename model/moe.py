"""Mixture of experts with one shared expert."""

from __future__ import annotations

import math

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
        weights, chosen = self.router_probabilities(x).topk(self.top_k, dim=-1)  # [N, k]
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        if self.backend == "reference" or not decode:
            routed = self.sorted_experts(x, weights, chosen)
        elif chosen.numel() < self.gate.weight.shape[0]:
            routed = self.gathered_experts(x, weights, chosen)
        else:
            routed = self.all_experts(x, weights, chosen)
        return routed + self.shared(x)

    def sorted_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Weighted sum ``[N, H]`` over chosen experts ``[N, k]``; experts no row chose are not touched."""
        routed = torch.zeros_like(x)
        # One sort instead of a comparison per expert; rows of one expert become one contiguous product.
        order = chosen.flatten().argsort(stable=True)
        rows = order // self.top_k
        counts = torch.bincount(chosen.flatten(), minlength=self.gate.weight.shape[0]).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            picked = order[start : start + count]
            row = rows[start : start + count]
            start += count
            gate, up = F.linear(x[row], self.experts.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.experts.down_proj[expert])
            routed.index_add_(0, row, y * weights.flatten()[picked].unsqueeze(-1))
        return routed

    def gathered_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The same sum with a copy of each chosen expert's weights: for fewer choices than experts."""
        expert = chosen.flatten()  # [N k]
        rows = x.repeat_interleave(self.top_k, dim=0).unsqueeze(-1)  # [N k, H, 1]
        gate, up = torch.bmm(self.experts.gate_up_proj[expert], rows).chunk(2, dim=1)
        y = torch.bmm(self.experts.down_proj[expert], F.silu(gate) * up)  # [N k, H, 1]
        y = y.squeeze(-1) * weights.flatten().unsqueeze(-1)
        return y.unflatten(0, chosen.shape).sum(1)

    def all_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The same sum over all experts, most of them with weight 0: every weight is read once."""
        gate, up = torch.matmul(x, self.experts.gate_up_proj.mT).chunk(2, dim=-1)  # [E, N, I]
        y = torch.matmul(F.silu(gate) * up, self.experts.down_proj.mT)  # [E, N, H]
        # Where a row's weight is 0, the product is left out, not multiplied: it may be infinite.
        full = torch.zeros(len(x), y.shape[0], dtype=x.dtype, device=x.device).scatter(1, chosen, weights)
        share = full.t().unsqueeze(-1)  # [E, N, 1]
        return torch.where(share != 0, y * share, 0).sum(0)
