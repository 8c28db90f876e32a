"""Inputs reduced to what compilation depends on, so that many processes can compile for large ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Tensors of one entry a page: how many there are is no argument of a kernel.
_PAGED = (
    "k_pages", "v_pages", "k_token_scales", "v_token_scales", "k_scale_pages", "v_scale_pages",
    "compressed_pages",
)  # fmt: skip


@dataclass(frozen=True)
class _Shape:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Outline:
    """Shapes, strides and dtypes of a dataclass of tensors, and what is no tensor; can be sent to a process.

    A kernel compiled for :meth:`zeros` serves the inputs it was taken from: pointers are aligned alike. A
    launch on them is harmless: whatever a kernel writes then lies within page 0, request 0 or row 0.
    """

    cls: type[Any]
    fields: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> Outline:
        """The outline of inputs, with a pool of one page."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(inputs):
            value = getattr(inputs, field.name)
            if isinstance(value, Tensor):
                part = value[:1] if field.name in _PAGED else value
                value = _Shape(tuple(part.shape), part.stride(), part.dtype)
            elif dataclasses.is_dataclass(value):
                value = Outline.of(value)
            fields[field.name] = value
        return cls(type(inputs), fields)

    def zeros(self, device: torch.device) -> Any:
        """Inputs of zeros on a device."""
        values: dict[str, Any] = {}
        for name, value in self.fields.items():
            if isinstance(value, _Shape):
                value = torch.empty_strided(
                    value.size, value.stride, dtype=value.dtype, device=device
                ).zero_()
            elif isinstance(value, Outline):
                value = value.zeros(device)
            values[name] = value
        return self.cls(**values)
