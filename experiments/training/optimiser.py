"""Muon for matrices, Adam for the rest."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from page4.experiments.training.config import TrainConfig


def orthogonalise(gradient: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of ``[..., m, n]`` by a quintic Newton-Schulz iteration in bf16.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers"; singular values end near 1, not at it.
    """
    x = gradient.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon trains this parameter: a linear map of some size, not an embedding or a convolution."""
    excluded = ("embed_tokens", "ngram_embedding", "lm_head", "conv1d")
    return (
        parameter.ndim >= 2 and min(parameter.shape[-2:]) >= 24 and not any(part in name for part in excluded)
    )


class Optimiser:
    """Muon (momentum 0.95, Nesterov, decoupled decay) on matrices stacked by shape, and Adam in groups."""

    momentum = 0.95

    def __init__(self, model: nn.Module, config: TrainConfig, fused: bool) -> None:
        self.config = config
        self.parameters = dict(model.named_parameters())
        self.groups: dict[str, list[nn.Parameter]] = defaultdict(list)
        adam: dict[str, list[nn.Parameter]] = {"embedding": [], "ngram": [], "small": []}
        for name, parameter in self.parameters.items():
            if is_matrix(name, parameter):
                part = "mtp" if name.startswith("mtp.") else "trunk"
                part += ".indexer" if "indexer" in name else ""
                self.groups[f"{part}:{'x'.join(map(str, parameter.shape[-2:]))}"].append(parameter)
            elif "ngram_embedding" in name:
                adam["ngram"].append(parameter)
            elif "embed_tokens" in name or "lm_head" in name:
                adam["embedding"].append(parameter)
            else:
                adam["small"].append(parameter)
        rates = {"embedding": config.adam_embedding, "ngram": config.adam_ngram, "small": config.adam_small}
        self.rates = [rates[name] for name in adam]
        self.adam = torch.optim.AdamW(
            [
                {"params": members, "lr": rates[name], "weight_decay": 0.0 if name == "small" else 0.01}
                for name, members in adam.items()
            ],
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=fused,
        )
        self.buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update with all learning rates times ``factor``; clears the gradients."""
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.adam.step()
        rate = self.config.learning_rate * factor
        for key, members in self.groups.items():
            active: list[Tensor] = [p for p in members if p.grad is not None]
            if not active:
                continue
            rows, columns = active[0].shape[-2:]
            gradient = torch.cat([p.grad.reshape(-1, rows, columns) for p in active if p.grad is not None])
            buffer = self.buffers.get(key)
            if buffer is None or buffer.shape != gradient.shape:
                buffer = self.buffers[key] = torch.zeros_like(gradient)
            buffer.mul_(self.momentum).add_(gradient)
            update = orthogonalise(gradient.add(buffer, alpha=self.momentum))
            update = update * (-rate * max(1.0, rows / columns) ** 0.5)
            pieces = update.split([p.numel() // (rows * columns) for p in active])
            torch._foreach_mul_(active, 1 - rate * self.config.weight_decay)
            torch._foreach_add_(active, [u.view_as(p) for u, p in zip(pieces, active, strict=True)])
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Adam's state and Muon's momentum."""
        return {"adam": self.adam.state_dict(), "muon": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was taken."""
        self.adam.load_state_dict(state["adam"])
        self.buffers = dict(state["muon"])
