"""What can be tuned: what a kernel's best configuration depends on, and which configurations are possible."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from page4.kernels.block_plan import RowGroups, check_group_rows
from page4.kernels.codecs import check_kv_format
from page4.kernels.errors import InputError
from page4.kernels.index_scores_triton import ScoresConfig
from page4.kernels.page4_attention_gluon import GluonConfig
from page4.kernels.page4_attention_inputs import HEAD_DIMS, MAX_HEADS_PER_KV, AttentionInputs
from page4.kernels.page4_attention_triton import AttentionConfig
from page4.kernels.qsa_prepare_inputs import QSAStorage
from page4.kernels.qsa_prepare_triton import PrepareConfig

_MOST_WARPS = 32
_MOST_STAGES = 8
_MOST_ROWS = 64


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
        _check_positive(self, "groups", "kv_heads")
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
class ScoresKey:
    """What the best configuration of index scores depends on (16-bit queries and keys).

    Attributes:
        groups, rows_per_group: of the step.
        index_heads, index_dim: of the indexer.
        columns: blocks that the scores have room for, rounded up to a power of two.
    """

    groups: int
    rows_per_group: int
    index_heads: int
    index_dim: int
    columns: int

    REACH: ClassVar[Mapping[str, tuple[float, float]]] = {"groups": (0.5, 2.0), "columns": (0.5, 2.0)}

    def __post_init__(self) -> None:
        """Refuse what no call has.

        Raises:
            InputError: the first field outside its range.
        """
        check_group_rows(self.rows_per_group)
        _check_positive(self, "groups", "index_heads", "index_dim")
        if not _is_power_of_two(self.columns):
            raise InputError(f"columns must be a power of two, got {self.columns}")

    @classmethod
    def of(cls, index_q: Tensor, groups: RowGroups, scores: Tensor) -> ScoresKey:
        """The key of a call."""
        return cls(
            groups=max(1, len(groups.rows)),
            rows_per_group=groups.rows_per_group,
            index_heads=index_q.shape[1],
            index_dim=index_q.shape[2],
            columns=1 << max(0, scores.shape[1] - 1).bit_length(),
        )


@dataclass(frozen=True)
class PrepareKey:
    """What the best configuration of the prepare kernel depends on (16-bit projections).

    Attributes:
        rows: of the step.
        query_heads, kv_heads, head_dim: of attention.
        index_heads, index_dim: of the indexer.
        kv_format: name of the storage format.
    """

    rows: int
    query_heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    kv_format: str

    REACH: ClassVar[Mapping[str, tuple[float, float]]] = {"rows": (0.5, 2.0)}

    def __post_init__(self) -> None:
        """Refuse what no call has.

        Raises:
            InputError: the first field outside its range.
        """
        check_kv_format(self.kv_format)
        _check_positive(self, *(name for name in vars(self) if name != "kv_format"))

    @classmethod
    def of(cls, q_gate: Tensor, k: Tensor, index: Tensor, storage: QSAStorage) -> PrepareKey:
        """The key of a call."""
        index_dim = storage.ring.shape[2]
        return cls(
            rows=max(1, q_gate.shape[0]),
            query_heads=q_gate.shape[1],
            kv_heads=k.shape[1],
            head_dim=k.shape[2],
            index_heads=index.shape[1] // index_dim - 1,
            index_dim=index_dim,
            kv_format=storage.kv_format,
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
    _check_stages(config.num_stages)


def _check_gluon(key: AttentionKey, config: GluonConfig) -> None:
    _check_warps(config.num_warps)
    config.check(key.head_dim, key.heads_per_kv, key.rows_per_group, key.kv_format)


def _check_scores(key: ScoresKey, config: ScoresConfig) -> None:
    _check_warps(config.num_warps)
    _check_stages(config.num_stages)
    if not (_is_power_of_two(config.tile_blocks) and config.tile_blocks >= 16):
        raise InputError(f"tile_blocks must be a power of two from 16 on, got {config.tile_blocks}")
    _check_positive(config, "programs")


def _check_prepare(key: PrepareKey, config: PrepareConfig) -> None:
    if not (_is_power_of_two(config.rows_per_program) and config.rows_per_program <= _MOST_ROWS):
        raise InputError(
            f"rows_per_program must be a power of two up to {_MOST_ROWS}, got {config.rows_per_program}"
        )


def _check_positive(values: Any, *names: str) -> None:
    for name in names:
        if getattr(values, name) < 1:
            raise InputError(f"{name} must be at least 1, got {getattr(values, name)}")


def _check_stages(num_stages: int) -> None:
    if not 1 <= num_stages <= _MOST_STAGES:
        raise InputError(f"num_stages must lie in 1..{_MOST_STAGES}, got {num_stages}")


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
        TunableKernel("index_scores_triton", ScoresKey, ScoresConfig, _check_scores),
        TunableKernel("qsa_prepare_triton", PrepareKey, PrepareConfig, _check_prepare),
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
    """Name -> int, bool or str for every field of a key or a configuration; names to choose from are str."""
    hints = typing.get_type_hints(cls)
    types = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return {name: str if typing.get_origin(hint) is Literal else hint for name, hint in types.items()}
