"""Configuration of the tuning of kernels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from page4.experiments.config_checks import check_least
from page4.experiments.kernel_cases import StepShape
from page4.kernels.errors import InputError
from page4.kernels.tunable import TUNABLE, get_tunable


@dataclass(frozen=True)
class AutotuneConfig:
    """Which kernels are tuned for which steps, the most important ones first.

    Attributes:
        kernels: Names of tunable kernels; empty means all.
        shapes: (requests, rows, query heads, KV heads, head dim, context, overlap) of steps, see
            `kernel_cases.StepShape`. With a budget, the later ones may be left out.
        kv_formats: KV formats of every shape; kernels skip those that they do not read. Byte floats without
            entries take those of e4m3, so the others need not be tuned.
        configs: Folder of configurations that the results are merged into; None is `configs` in the result
            folder. Those of the package are in `kernels/configs`.
        seconds: Budget, from the start on; 0 means none. Steps that are not finished by then are left out.
        replays: CUDA-graph replays of which the median counts.
        processes: Processes that compile; 0 means one per processor but one.
        seed: Of the inputs.
    """

    kernels: tuple[str, ...] = ()
    # The goals' steps; batches of the acceptance study, whose model has heads 12/2 of 64; between and beyond.
    shapes: tuple[tuple[int, int, int, int, int, int, float], ...] = (
        (64, 4, 6, 1, 256, 32768, 0.9),
        (64, 4, 24, 2, 256, 32768, 0.9),
        (1, 4, 6, 1, 256, 32768, 0.9),
        (1, 1, 6, 1, 256, 32768, 0.9),
        (16, 4, 24, 2, 256, 32768, 0.9),
        (4, 4, 24, 2, 256, 32768, 0.9),
        (32, 4, 12, 2, 64, 32768, 0.9),
        (32, 1, 12, 2, 64, 32768, 0.9),
        (1, 4, 24, 2, 256, 32768, 0.9),
        (1, 1, 24, 2, 256, 32768, 0.9),
        (16, 4, 6, 1, 256, 32768, 0.9),
        (4, 4, 6, 1, 256, 32768, 0.9),
        (128, 4, 6, 1, 256, 32768, 0.9),
        (128, 4, 24, 2, 256, 32768, 0.9),
        (64, 1, 6, 1, 256, 32768, 0.9),
        (64, 1, 24, 2, 256, 32768, 0.9),
        (16, 1, 24, 2, 256, 32768, 0.9),
        (4, 1, 24, 2, 256, 32768, 0.9),
        (16, 1, 6, 1, 256, 32768, 0.9),
        (4, 1, 6, 1, 256, 32768, 0.9),
        (1, 8192, 24, 2, 256, 8192, 0.9),
    )
    kv_formats: tuple[str, ...] = ("e4m3", "fp16")
    configs: Path | None = None
    seconds: float = 0.0
    replays: int = 20
    processes: int = 0
    seed: int = 0

    QUICK: ClassVar[dict[str, Any]] = {
        "shapes": ((1, 4, 6, 1, 256, 8192, 0.9),),
        "kv_formats": ("e4m3",),
        "replays": 5,
    }

    def __post_init__(self) -> None:
        """Refuse what can be refused without a GPU."""
        for name in self.kernels:
            get_tunable(name)
        if not self.shapes or not self.kv_formats:
            raise InputError("shapes and kv_formats must each name at least one")
        _ = self.steps  # every shape must be one
        check_least(self, {"seconds": 0, "replays": 1, "processes": 0, "seed": 0})

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """The kernels to tune."""
        return self.kernels or tuple(TUNABLE)

    @property
    def steps(self) -> list[StepShape]:
        """Every shape in every format, in the order of importance.

        Raises:
            InputError: A shape that no step has.
        """
        return [
            StepShape(
                requests=requests,
                rows=rows,
                query_heads=query_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                context=context,
                overlap=overlap,
                kv_format=kv_format,
            )
            for requests, rows, query_heads, kv_heads, head_dim, context, overlap in self.shapes
            for kv_format in self.kv_formats
        ]

    def question(self) -> AutotuneConfig:
        """The same configuration without what decides only how much is done: what a folder belongs to."""
        return dataclasses.replace(self, configs=None, seconds=0.0, processes=0)
