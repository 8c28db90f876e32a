"""Configuration of the tuning by prediction, for a GPU that is not there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from page4.experiments.config_checks import check_least
from page4.experiments.kernel_cases import StepShape
from page4.kernels.errors import InputError
from page4.kernels.tunable import get_tunable

KINDS = {
    "page4_attention_gluon": "attention",
    "index_scores_triton": "scores",
    "qsa_prepare_triton": "prepare",
}
"""Inputs of the kernels that can be tuned for a V100; those that it runs by default."""


@dataclass(frozen=True)
class PredictedTuningConfig:
    """Which kernels are tuned for which steps on a V100, the most important ones first.

    Attributes:
        kernels: names; empty means all of :data:`KINDS`.
        requests, rows, heads, kv_formats: of steps, in all combinations; heads are (query, KV). Kernels skip
            what they do not read or what changes nothing for them.
        followers: of the KV formats those that are only tried with the default and with what is best for the
            first format.
        context: tokens of a request.
        overlap: share of a row's blocks that all rows of its request select.
        head_dim: D.
        topk: blocks that a row selects.
        configs: folder of configurations that the results are merged into; None is ``configs`` in the result
            folder. Those of the package are in ``kernels/configs``.
        kept_tiles: tiles that are tried with more than the default's splits.
        splits_step: least ratio of two numbers of splits that are tried; splits that are closer tie.
        least_programs: of attention on a multiprocessor that splits must lead to, as far as lists are long.
        most_blocks: of a launch that are emulated at most; the merge finds only what these left in L2.
        most_replayed_requests: larger steps are replayed as a share of their requests on as much of the GPU.
        seed: of the inputs.
    """

    kernels: tuple[str, ...] = ()
    requests: tuple[int, ...] = (16, 64, 4, 1)
    rows: tuple[int, ...] = (4, 1)
    heads: tuple[tuple[int, int], ...] = ((6, 1), (24, 2))
    kv_formats: tuple[str, ...] = ("e4m3", "fp16", "e5m2", "e3m4", "e2m5", "int8")
    followers: tuple[str, ...] = ("fp16", "e5m2", "e3m4", "e2m5", "int8")
    context: int = 32768
    overlap: float = 0.9
    head_dim: int = 256
    topk: int = 512
    configs: Path | None = None
    kept_tiles: int = 1
    splits_step: float = 1.5
    least_programs: float = 0.3
    most_blocks: int = 256
    most_replayed_requests: int = 4
    seed: int = 0

    QUICK: ClassVar[dict[str, Any]] = {
        "requests": (4,),
        "rows": (4,),
        "heads": ((6, 1),),
        "kv_formats": ("e4m3",),
        "context": 1024,
        "topk": 64,
    }

    def __post_init__(self) -> None:
        """Refuse what can be refused before anything is compiled."""
        for name in self.kernels:
            if get_tunable(name).name not in KINDS:
                raise InputError(f"kernel {name!r} is not tuned for a V100; choose one of {', '.join(KINDS)}")
        for name in ("requests", "rows", "heads", "kv_formats"):
            if not getattr(self, name):
                raise InputError(f"{name} must name at least one value")
        positive = ("kept_tiles", "most_blocks", "most_replayed_requests", "splits_step")
        check_least(self, dict.fromkeys(positive, 1) | {"seed": 0})
        if self.kv_formats[0] in self.followers:
            raise InputError(f"{self.kv_formats[0]} is the first KV format and cannot follow it")
        _ = self.steps  # every shape must be one

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """The kernels to tune."""
        return self.kernels or tuple(KINDS)

    @property
    def steps(self) -> list[StepShape]:
        """Every step, in the order of importance.

        Raises:
            InputError: a shape that no step has.
        """
        return StepShape.combinations(
            self.kv_formats,
            self.rows,
            self.heads,
            self.requests,
            context=self.context,
            overlap=self.overlap,
            head_dim=self.head_dim,
            topk=self.topk,
        )
