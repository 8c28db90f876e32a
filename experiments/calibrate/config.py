"""Configuration of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from page4.experiments.config_checks import BACKENDS, check_least, choose_by_device
from page4.kernels.errors import InputError
from page4.kvcache import get_format
from page4.kvcache.scale_rules import ScaleRule

TEXTS = Path(__file__).parent / "texts"
"""Excerpts of the training text, which come with the package: what the shipped scales are calibrated from."""


@dataclass(frozen=True)
class CalibrateConfig:
    """What is observed, of which model, and how a scale follows from it.

    Attributes:
        model: Checkpoint folder; None is the one that comes with the package.
        corpus: Folder of `.txt` files; None is excerpts of the shipped checkpoint's training text.
        prompts: Folder of the evaluation texts, which the corpus must not overlap; None is the held-out texts
            that come with the package.
        shingle_words: A corpus that shares this many words in a row with an evaluation text is refused.
        device: "auto" is CUDA when there is one.
        backend: Implementation of the sparse layers: "triton" kernels (None on CUDA) or PyTorch "reference".
        kv_format: Format that the scales are for.
        rule: "max" clips nothing that was seen, "percentile" what lies beyond it, "mse" has the least squared
            error.
        percent: Of the rule "percentile".
        window: Tokens that are run together; texts are cut into windows one after the other.
        max_windows: Windows used, taken from the texts in turn; 0 means all.
        prefill_chunk: Tokens per prefill step.
        shard: Which windows this run observes, of those that `shards` runs share out.
        shards: Runs that share the windows; `merge` puts them together.
        merge: Folders of calibrations of the same model. Nothing is run: the report is that of all of them.
    """

    model: Path | None = None
    corpus: Path | None = None
    prompts: Path | None = None
    shingle_words: int = 13
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["reference", "triton"] | None = None
    kv_format: str = "e4m3"
    rule: ScaleRule = "max"
    percent: float = 99.99
    window: int = 2048
    max_windows: int = 0
    prefill_chunk: int = 2048
    shard: int = 0
    shards: int = 1
    merge: tuple[Path, ...] = ()

    QUICK: ClassVar[dict[str, Any]] = {"window": 256, "max_windows": 3}

    def __post_init__(self) -> None:
        """Refuse what can be refused without looking at the checkpoint, the texts or the device."""
        if not get_format(self.kv_format).needs_scale:
            raise InputError(f"KV format {self.kv_format} has no static scales to calibrate")
        check_least(
            self, {"shingle_words": 1, "window": 2, "max_windows": 0, "prefill_chunk": 1, "shards": 1}
        )
        if not 0 <= self.shard < self.shards:
            raise InputError(
                f"shard is {self.shard}, expected 0 to {self.shards - 1} of {self.shards} shards"
            )
        if not 0 < self.percent <= 100:
            raise InputError(f"percent must be above 0 and at most 100, got {self.percent}")
        if self.merge and self.shards > 1:
            raise InputError("a merged calibration has no shards of its own: leave out shard and shards")

    def resolve(self) -> CalibrateConfig:
        """The same configuration with every choice made: what a result folder belongs to.

        Raises:
            InputError: CUDA was asked for and there is none.
        """
        return choose_by_device(self, BACKENDS)
