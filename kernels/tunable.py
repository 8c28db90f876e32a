"""What can be tuned: what a kernel's best configuration depends on, and which configurations are possible."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from page4.kernels.block_plan import check_group_rows
from page4.kernels.codecs import check_kv_format
from page4.kernels.errors import InputError
from page4.kernels.page4_attention_gluon import GLUON_FORMATS, GluonConfig
from page4.kernels.page4_attention_inputs import HEAD_DIMS, MAX_HEADS_PER_KV, AttentionInputs
from page4.kernels.page4_attention_triton import AttentionConfig

_MOST_WARPS = 32
_MOST_STAGES = 8


@dataclass(frozen=True)
class AttentionKey:
    """What the best configuration of grouped attention depends on (FP16 queries).

    Attributes:
        groups: groups of rows; requests, where a step verifies drafts.
        rows_per_group: the most rows of a group, 1..8.
        heads_per_kv: query heads that share a KV head, 1..16.
        kv_heads, head_dim: of the layer.
        capacity: blocks that a group's list has room for, rounded up to a power of two.
        kv_format: name of the storage format.
    """

    groups: int
    rows_per_group: int
    heads_per_kv: int
    kv_heads: int
    head_dim: int
    capacity: int
    kv_format: str

    # How much smaller and larger than wanted an entry's field may be; all other fields must be equal. A list
    # must not be longer than where the configuration was tried: its blocks take shared memory.
    REACH: ClassVar[Mapping[str, tuple[float, float]]] = {"groups": (0.5, 2.0), "capacity": (1.0, 2.0)}

    def __post_init__(self) -> None:
        """Refuse what no call has.

        Raises:
            InputError: the first field outside its range.
        """
        check_kv_format(self.kv_format)
        check_group_rows(self.rows_per_group)
        if not 1 <= self.heads_per_kv <= MAX_HEADS_PER_KV:
            raise InputError(f"heads_per_kv must lie in 1..{MAX_HEADS_PER_KV}, got {self.heads_per_kv}")
        if self.head_dim not in HEAD_DIMS:
            raise InputError(f"head_dim must be one of {HEAD_DIMS}, got {self.head_dim}")
        for name in ("groups", "kv_heads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not _is_power_of_two(self.capacity):
            raise InputError(f"capacity must be a power of two, got {self.capacity}")

    @classmethod
    def of(cls, inputs: AttentionInputs) -> AttentionKey:
        """The key of a call."""
        return cls(
            groups=max(1, inputs.groups),
            rows_per_group=inputs.rows_per_group,
            heads_per_kv=inputs.heads_per_kv,
            kv_heads=inputs.kv_heads,
            head_dim=inputs.head_dim,
            capacity=1 << max(0, inputs.plan.blocks.shape[1] - 1).bit_length(),
            kv_format=inputs.kv_format,
        )


@dataclass(frozen=True)
class TunableKernel:
    """A kernel whose configurations can be recorded.

    Attributes:
        name: of the kernel's module, and of its files.
        key: dataclass of ints and texts with a class attribute ``REACH``.
        config: dataclass of ints.
        check: raises InputError where no call with the key can have the configuration.
    """

    name: str
    key: type[Any]
    config: type[Any]
    check: Callable[[Any, Any], None]


def _check_plain(key: AttentionKey, config: AttentionConfig) -> None:
    _check_warps(config.num_warps)
    if not 1 <= config.num_stages <= _MOST_STAGES:
        raise InputError(f"num_stages must lie in 1..{_MOST_STAGES}, got {config.num_stages}")


def _check_gluon(key: AttentionKey, config: GluonConfig) -> None:
    if key.kv_format not in GLUON_FORMATS:
        raise InputError(f"the Gluon kernel reads {', '.join(GLUON_FORMATS)}, got {key.kv_format}")
    _check_warps(config.num_warps)
    config.check(key.head_dim)


def _check_warps(num_warps: int) -> None:
    if not (_is_power_of_two(num_warps) and num_warps <= _MOST_WARPS):
        raise InputError(f"num_warps must be a power of two up to {_MOST_WARPS}, got {num_warps}")


def _is_power_of_two(value: int) -> bool:
    return value >= 1 and value & (value - 1) == 0


TUNABLE: dict[str, TunableKernel] = {
    kernel.name: kernel
    for kernel in (
        TunableKernel("page4_attention_gluon", AttentionKey, GluonConfig, _check_gluon),
        TunableKernel("page4_attention_triton", AttentionKey, AttentionConfig, _check_plain),
    )
}


def get_tunable(name: str) -> TunableKernel:
    """The tunable kernel called ``name``.

    Raises:
        InputError: there is none.
    """
    if name not in TUNABLE:
        raise InputError(f"kernel {name!r} cannot be tuned; choose one of {', '.join(TUNABLE)}")
    return TUNABLE[name]


def field_types(cls: type[Any]) -> dict[str, type]:
    """Name -> int, bool or str for every field of a key or a configuration."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
