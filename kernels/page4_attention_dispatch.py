"""Grouped attention by the fastest implementation that can run, with its tuned configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
import triton
from torch import Tensor

from page4.kernels.errors import InputError
from page4.kernels.page4_attention_gluon import (
    INSTRUCTIONS,
    GluonConfig,
    can_run,
    default_gluon_config,
    formats_of,
    page4_attention_gluon,
)
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.page4_attention_merge_triton import Partials
from page4.kernels.page4_attention_triton import (
    AttentionConfig,
    default_config,
    multiprocessor_count,
    page4_attention_triton,
)
from page4.kernels.tunable import AttentionKey
from page4.kernels.tuning import Configurations, Origin, active

Implementation = Literal["auto", "gluon", "triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


@dataclass(frozen=True)
class Choice:
    """Which implementation runs a call, and how.

    Attributes:
        implementation: ``gluon`` or ``triton``.
        why: one line for people.
        config: of the implementation.
        source: whether the configuration was recorded for this key (``exact``), for one near it (``bucket``),
            was never measured but predicted for this GPU (``predicted exact``, ``predicted bucket``), or is
            what the implementation decides by rule (``default``).
    """

    implementation: Literal["gluon", "triton"]
    why: str
    config: GluonConfig | AttentionConfig
    source: Origin


def gluon_obstacle(
    capability: tuple[int, int] | None, dtype: torch.dtype, kv_format: str, head_dim: int = 256
) -> str | None:
    """Why no Gluon kernel can run; None where one can.

    ``capability`` is the GPU's (major, minor), or None without a GPU; ``dtype`` is that of the queries.
    """
    if capability is None:
        return "it needs a GPU"
    instructions = [instruction for instruction in INSTRUCTIONS if can_run(instruction, capability)]
    if not instructions:
        return f"it needs compute capability 7.0, 8.0 or newer, the GPU has {capability[0]}.{capability[1]}"
    if dtype != torch.float16:
        return f"it takes float16 queries, got {str(dtype).removeprefix('torch.')}"
    formats = dict.fromkeys(name for instruction in instructions for name in formats_of(instruction))
    if kv_format not in formats:
        return f"it reads {', '.join(formats)}, got {kv_format}"
    if capability == (7, 0) and head_dim < 64:
        return f"on compute capability 7.0 it takes heads of 64 dimensions or more, got {head_dim}"
    return None


def choose_implementation(
    implementation: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    kv_format: str,
    head_dim: int = 256,
) -> tuple[Literal["gluon", "triton"], str]:
    """The implementation that a request gets, and why. An explicit request never falls back.

    Arguments as for :func:`gluon_obstacle`.

    Raises:
        InputError: an unknown name, or an implementation that cannot run here.
    """
    if implementation not in IMPLEMENTATIONS:
        raise InputError(
            f"implementation {implementation!r} is unknown, expected one of {', '.join(IMPLEMENTATIONS)}"
        )
    obstacle = gluon_obstacle(capability, dtype, kv_format, head_dim)
    if implementation == "gluon" and obstacle is not None:
        raise InputError(f"implementation 'gluon' cannot run: {obstacle}")
    if implementation != "triton" and obstacle is None:
        return "gluon", "asked for" if implementation == "gluon" else "the fastest that can run"
    if capability is None and not triton.knobs.runtime.interpret:
        raise InputError("grouped attention in Triton needs a GPU, or TRITON_INTERPRET=1 for tests")
    return "triton", "asked for" if implementation == "triton" else f"gluon cannot run: {obstacle}"


@cache
def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None for the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def chosen(inputs: AttentionInputs, implementation: Implementation = "auto") -> Choice:
    """What :func:`page4_attention` runs for a call.

    Costs a look into a dictionary once a shape was seen. Nothing synchronises with the GPU.

    Raises:
        InputError: an unknown implementation, one that cannot run, or an unusable file of configurations.
    """
    configurations = active()
    q = inputs.q
    seen = (
        implementation, q.device, q.dtype, q.shape[1], q.shape[2], inputs.kv_heads, inputs.kv_format,
        inputs.rows_per_group, inputs.plan.blocks.shape,
    )  # fmt: skip
    return configurations.once(seen, lambda: _choose(inputs, implementation, configurations))


def page4_attention(
    inputs: AttentionInputs,
    implementation: Implementation = "auto",
    partials: Partials | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The contract of :func:`~page4.kernels.page4_attention_triton.page4_attention_triton`, by any kernel.

    ``auto`` takes Gluon on compute capability 7.0 and from 8.0 on, for FP16 queries and the formats that it
    reads, and plain Triton otherwise; :func:`chosen` says which. ``partials`` must have the splits of the
    choice.

    Raises:
        InputError: an implementation that is unknown or cannot run, or what the kernels refuse.
    """
    config = chosen(inputs, implementation).config
    if isinstance(config, GluonConfig):
        return page4_attention_gluon(inputs, config, partials, out, lse)
    return page4_attention_triton(inputs, config, partials, out, lse)


def _choose(inputs: AttentionInputs, implementation: str, configurations: Configurations) -> Choice:
    device = inputs.q.device
    capability = device_capability(device)
    name, why = choose_implementation(
        implementation, capability, inputs.q.dtype, inputs.kv_format, inputs.head_dim
    )
    kernel = f"page4_attention_{name}"
    key = AttentionKey.of(inputs)
    default = default_attention_config(inputs, name)
    match = configurations.resolve(kernel, key, device, default, tuned=inputs.q.dtype == torch.float16)
    return Choice(name, why, match.config, match.origin)


def default_attention_config(
    inputs: AttentionInputs, implementation: Literal["gluon", "triton"]
) -> GluonConfig | AttentionConfig:
    """The configuration that an implementation decides by rule."""
    device = inputs.q.device
    multiprocessors = multiprocessor_count(device)
    if implementation == "gluon":
        return default_gluon_config(inputs, multiprocessors)
    capability = device_capability(device)
    return default_config(inputs, multiprocessors, tensor_cores=capability is None or capability >= (8, 0))
