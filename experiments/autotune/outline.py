"""Inputs reduced to what compilation depends on, so that many processes can compile for large ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from page4.kernels.block_plan import PackedPlan
from page4.kernels.page4_attention_inputs import AttentionInputs

_PAGED = ("k_pages", "v_pages", "k_token_scales", "v_token_scales")


@dataclass(frozen=True)
class _Shape:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def zeros(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device).zero_()


@dataclass(frozen=True)
class Outline:
    """Shapes, strides and dtypes of attention inputs, and what is no tensor; it can be sent to a process.

    A kernel compiled for :meth:`inputs` serves the inputs it was taken from: pointers are aligned alike, and
    the number of pages is no argument of a kernel.
    """

    fields: dict[str, Any]
    plan: dict[str, _Shape]

    @classmethod
    def of(cls, inputs: AttentionInputs) -> Outline:
        """The outline of inputs, with a pool of one page."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(inputs):
            value = getattr(inputs, field.name)
            if isinstance(value, Tensor):
                fields[field.name] = _Shape.of(value[:1] if field.name in _PAGED else value)
            elif field.name != "plan":
                fields[field.name] = value
        return cls(fields, {name: _Shape.of(values) for name, values in vars(inputs.plan).items()})

    def inputs(self, device: torch.device) -> AttentionInputs:
        """Inputs of zeros on a device: all groups are padding, so that a launch reads and writes nothing."""
        plan = PackedPlan(**{name: shape.zeros(device) for name, shape in self.plan.items()})
        fields: dict[str, Any] = {
            name: value.zeros(device) if isinstance(value, _Shape) else value
            for name, value in self.fields.items()
        }
        return AttentionInputs(plan=plan, **fields)
