"""Configuration of the comparison of predictions with a real V100."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from page4.experiments.config_checks import check_least

SHIPPED_PREDICTIONS = Path(__file__).resolve().parents[2] / "results" / "sm70"  # of a checkout


@dataclass(frozen=True)
class ValidateConfig:
    """Which predictions are measured, and how.

    Attributes:
        predictions: folder that ``page4 sm70 predict`` wrote; its steps are measured. None: the shipped one.
        kernel_configs: tuned configurations of the kernels: those ``shipped`` with the package, a folder, or
            ``defaults``: none. Predictions hold for the ones that they were made with.
        requests, kv_formats: of the steps that are measured; empty means all.
        other_gpu: measure on a GPU that is no V100, to see the command at work; nothing is compared then.
        replays: samples of every time.
        check_groups: groups of rows, chosen at random, that are compared with float64 before a time counts.
        seed: of all random inputs.
    """

    predictions: Path | None = None
    kernel_configs: Literal["shipped", "defaults"] | Path = "shipped"
    requests: tuple[int, ...] = ()
    kv_formats: tuple[str, ...] = ()
    other_gpu: bool = False
    replays: int = 50
    check_groups: int = 8
    seed: int = 0

    QUICK: ClassVar[dict[str, Any]] = {
        "requests": (4,),
        "kv_formats": ("e4m3",),
        "replays": 10,
        "check_groups": 2,
    }

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        check_least(self, {"replays": 1, "check_groups": 1, "seed": 0})

    @property
    def folder(self) -> Path:
        """The folder of predictions."""
        return self.predictions or SHIPPED_PREDICTIONS
