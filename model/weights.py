"""Parameters whose state-dict names end in ``.weight`` without being an ``nn.Linear``."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Weight(nn.Module):
    """One bare parameter ``weight``; modules read it where the published name is ``<name>.weight``."""

    weight: nn.Parameter

    def __init__(self, *shape: int, std: float = 0.0, mean: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(mean + std * torch.randn(shape) if std else torch.full(shape, mean))

    def forward(self) -> Tensor:
        """The parameter itself."""
        return self.weight


def projection(out_features: int, in_features: int, gain: float = 0.5) -> nn.Linear:
    """A bias-free linear map, initialised to ``gain / sqrt(in_features)``."""
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(linear.weight, std=gain / math.sqrt(in_features))
    return linear
