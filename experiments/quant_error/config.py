"""Configuration of the study of quantisation errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from page4.experiments.config_checks import check_confidence, check_least, check_lengths, choose_by_device
from page4.experiments.prompt_windows import NONCE_CHARACTERS
from page4.kernels.errors import InputError
from page4.kvcache import RECOMMENDED, get_format
from page4.kvcache.scale_rules import ScaleRule


class Arm(NamedTuple):
    """One condition: target and draft store K and V in this format, with scales by this rule.

    Attributes:
        kv_format: The format.
        rule: How its static scales are chosen; None of a format that has none.
    """

    kv_format: str
    rule: ScaleRule | None

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        return self.kv_format if self.rule is None else f"{self.kv_format}-{self.rule}"


class Window(NamedTuple):
    """Rows that are put together: those at the positions `first .. stop - 1` of a prompt."""

    first: int
    stop: int


@dataclass(frozen=True)
class QuantErrorConfig:
    """What is measured, on what, and how often. Fields that are None are chosen by device, see `resolve`.

    Attributes:
        model: Checkpoint folder; None is the one that comes with the package.
        prompts: Folder of `.txt` files; None is the held-out texts that come with the package.
        texts: Names of the texts to use; empty means all.
        device: "auto" is CUDA when there is one.
        backend: Implementation of the sparse layers: "triton" kernels (None on CUDA) or PyTorch "reference".
        dtype: Of weights, activations and the unquantised cache. In "float16" (None on CUDA, as in all
            studies) what a format moves is rounded anew in every layer, which adds to the smallest effects;
            "float32" (None on a CPU) shows what formats do alone.
        kernel_configs: Tuned configurations of the kernels: those "shipped" with the package, a folder that
            `page4 autotune` wrote, or "defaults": none.
        seed: Decides anchors, nonces and resampling.
        formats: KV formats, each an arm per rule if it has static scales, else one arm.
        rules: Scale rules, see `choose_scale`.
        percent: Of the rule "percentile".
        lengths: Context lengths in tokens, ascending, nonce included.
        num_prompts: Anchors, the same ones at every length.
        scored_tokens: Rows at the end of every prompt that are put together; they predict the same tokens at
            every length that has the nonce before them, see `scored_alike`.
        first_bucket: Positions of the longest prompts are put together up to here and from there to every
            power of two of it.
        selection_stride: One row in so many has its selected blocks compared.
        prefill_chunk: Tokens per prefill step.
        corpus: Folder of `.txt` files that scales are calibrated from; None is excerpts of the shipped
            checkpoint's training text. It must not overlap the prompts' texts.
        calibration_window: Tokens of the corpus that are run together.
        calibration_windows: Windows used, taken from its texts in turn; 0 means all.
        resamples: Bootstrap resamples.
        confidence: Coverage of the intervals.
    """

    model: Path | None = None
    prompts: Path | None = None
    texts: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["reference", "triton"] | None = None
    dtype: Literal["float16", "float32"] | None = None
    kernel_configs: Literal["shipped", "defaults"] | Path = "shipped"
    seed: int = 0
    formats: tuple[str, ...] = ("fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8")
    rules: tuple[ScaleRule, ...] = ("max", "percentile", "mse")
    percent: float = 99.99
    lengths: tuple[int, ...] | None = None
    num_prompts: int | None = None
    scored_tokens: int = 512
    first_bucket: int = 512
    selection_stride: int = 8
    prefill_chunk: int | None = None
    corpus: Path | None = None
    calibration_window: int = 2048
    calibration_windows: int = 0
    resamples: int = 10_000
    confidence: float = 0.95

    QUICK: ClassVar[dict[str, Any]] = {
        "formats": ("fp16", "e4m3", "e3m4", RECOMMENDED, "int8"),
        "rules": ("max",),
        "lengths": (256, 512),
        "num_prompts": 6,
        "scored_tokens": 128,
        "first_bucket": 128,
        "calibration_window": 512,
        "calibration_windows": 4,
    }
    BY_DEVICE: ClassVar[Mapping[str, dict[str, Any]]] = {
        "cpu": {
            "backend": "reference",
            "dtype": "float32",
            "lengths": (1024, 3072),
            "num_prompts": 6,
            "prefill_chunk": 1024,
        },
        "cuda": {
            "backend": "triton",
            "dtype": "float16",
            "lengths": (1024, 4096, 16384, 32768),
            "num_prompts": 20,
            "prefill_chunk": 4096,
        },
    }

    def __post_init__(self) -> None:
        """Refuse what can be refused without looking at the checkpoint, the texts or the device."""
        for name in ("formats", "rules"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise InputError(f"{name} must be different and at least one, got {', '.join(values)}")
        for kv_format in self.formats:
            get_format(kv_format)
        check_lengths(self.lengths)
        check_least(self, _LEAST)
        if not 0 < self.percent <= 100:
            raise InputError(f"percent must be above 0 and at most 100, got {self.percent}")
        check_confidence(self.confidence)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """A format with static scales once per rule, any other once."""
        return tuple(
            Arm(kv_format, rule)
            for kv_format in self.formats
            for rule in (self.rules if get_format(kv_format).needs_scale else (None,))
        )

    def scored(self, length: int) -> Window:
        """The rows at the end of a prompt."""
        return Window(max(0, length - self.scored_tokens), length)

    def scored_alike(self, length: int) -> bool:
        """Whether they predict the same tokens as those of every longer prompt: none of the nonce's."""
        return length - self.scored_tokens >= NONCE_CHARACTERS

    @property
    def buckets(self) -> list[Window]:
        """The positions of the longest prompts, of a resolved configuration."""
        assert self.lengths is not None
        buckets, first, stop = [], 0, self.first_bucket
        while first < self.lengths[-1]:
            buckets.append(Window(first, min(stop, self.lengths[-1])))
            first, stop = stop, 2 * stop
        return buckets

    def windows(self, length: int) -> list[Window]:
        """Everything that is put together of a prompt of this length, each window once."""
        assert self.lengths is not None
        buckets = self.buckets if length == self.lengths[-1] else []
        return list(dict.fromkeys([self.scored(length), *buckets]))

    def resolve(self) -> QuantErrorConfig:
        """The same configuration with every choice made: what a result folder belongs to.

        Raises:
            InputError: CUDA was asked for and there is none.
        """
        return choose_by_device(self, self.BY_DEVICE)


_LEAST = {
    "num_prompts": 1,
    "scored_tokens": 1,
    "first_bucket": 1,
    "selection_stride": 1,
    "prefill_chunk": 1,
    "calibration_window": 2,
    "calibration_windows": 0,
    "resamples": 100,
    "seed": 0,
}
