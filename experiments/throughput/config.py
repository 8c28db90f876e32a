"""Configuration of the throughput study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from page4.experiments.acceptance.config import Arm, treated_arms
from page4.experiments.config_checks import check_confidence, check_least, check_lengths, choose_by_device
from page4.experiments.step_timing import most_tokens
from page4.kernels.errors import InputError
from page4.kvcache import LayerFormats, get_format
from page4.kvcache.prefix_cache import PrefixConfig
from page4.spec_decode import SamplingOptions
from page4.spec_decode.engine import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class ThroughputConfig:
    """What is measured, on what, and how often. Fields that are None are chosen by device, see `resolve`.

    Attributes:
        model: Checkpoint folder; None is the one that comes with the package.
        public_layers: Instead of a checkpoint, the first so many layers of the public checkpoint's geometry
            and its MTP head, with random weights: only its times mean something. 0: a checkpoint.
        prompts: Folder of `.txt` files; None is the held-out texts that come with the package.
        texts: Names of the texts to use; empty means all.
        device: "auto" is CUDA when there is one.
        backend: Implementation of the hot paths: "triton" kernels (None on CUDA) or PyTorch "reference".
        kernel_configs: Tuned configurations of the kernels: those "shipped" with the package, a folder that
            `page4 autotune` wrote, or "defaults": none.
        seed: Decides anchors, nonces, sampling and resampling.
        arms: (name, target format, draft format, nonce id) each, the first is the baseline. One with the
            baseline's formats and another nonce is an A/A control.
        lengths: Prompt lengths in tokens, ascending, nonce included.
        num_prompts: Prompts of every length, one at a time.
        steps: Timed decode steps of each prompt.
        builds: Decoders of every arm, which prompts take in turn. They have buffers of their own: where those
            lie changes a step's time by a few percent, more than formats do, and with one decoder an arm
            that would pass for the arm's effect, in a narrow interval. Not more than prompts.
        temperature: Of tokens and drafts; text that is sampled at 1 does not loop, greedy text does.
        num_draft_tokens: K, drafts per step.
        prefill_chunk: Prompt tokens per prefill step.
        prefix_interval: Keep prompts' prefixes for later ones, as a server does, with snapshots so many
            tokens apart; 0 keeps none. Their nonces keep all prompts from finding one; a study whose prompt
            does find one ends with an error.
        calibration_tokens: How much of each prompt's beginning the KV scales are calibrated from.
        resamples: Bootstrap resamples.
        confidence: Coverage of the intervals.
    """

    model: Path | None = None
    public_layers: int = 0
    prompts: Path | None = None
    texts: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["reference", "triton"] | None = None
    kernel_configs: Literal["shipped", "defaults"] | Path = "shipped"
    seed: int = 0
    arms: tuple[tuple[str, str, str, int], ...] = (
        ("fp16", "fp16", "fp16", 0),
        ("e4m3", "e4m3", "e4m3", 0),
        ("e2m5", "e2m5", "e2m5", 0),
        ("fp16_again", "fp16", "fp16", 1),
    )
    lengths: tuple[int, ...] | None = None
    num_prompts: int | None = None
    steps: int | None = None
    builds: int | None = None
    temperature: float = 1.0
    num_draft_tokens: int = 3
    prefill_chunk: int = 2048
    prefix_interval: int = 0
    calibration_tokens: int = 512
    resamples: int = 10_000
    confidence: float = 0.95

    QUICK: ClassVar[dict[str, Any]] = {"lengths": (256, 512), "num_prompts": 2, "steps": 8, "builds": 2}
    BY_DEVICE: ClassVar[Mapping[str, dict[str, Any]]] = {
        "cpu": {"backend": "reference", "lengths": (1024, 4096), "num_prompts": 6, "steps": 24, "builds": 1},
        "cuda": {
            "backend": "triton",
            "lengths": (1024, 4096, 8192, 32768),
            "num_prompts": 16,
            "steps": 96,
            "builds": 16,
        },
    }

    def __post_init__(self) -> None:
        """Refuse what can be refused without looking at the checkpoint, the texts or the device."""
        if self.model is not None and self.public_layers:
            raise InputError("model and public_layers exclude each other: a checkpoint, or random weights")
        if not self.arms or len({arm.name for arm in self.all_arms} - {""}) < len(self.arms):
            raise InputError(f"arms must be at least one, each with a name of its own, got {self.arms}")
        for arm in self.all_arms:
            LayerFormats(arm.target_format)
            get_format(arm.draft_format)
        check_lengths(self.lengths)
        if not 1 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(f"num_draft_tokens must be 1 to {MAX_DRAFT_TOKENS}, got {self.num_draft_tokens}")
        check_least(self, _LEAST)
        SamplingOptions(self.temperature, seed=self.seed + (self.num_prompts or 0))  # the last prompt's
        check_confidence(self.confidence)
        _ = self.prefix

    @property
    def prefix(self) -> PrefixConfig | None:
        """What is kept of prompts.

        Raises:
            InputError: The interval does not fit the prefill chunk.
        """
        if not self.prefix_interval:
            return None
        config = PrefixConfig(interval=self.prefix_interval)
        config.check_chunk(self.prefill_chunk)
        return config

    @property
    def all_arms(self) -> tuple[Arm, ...]:
        """The arms by field name, the baseline first."""
        return tuple(Arm(*arm) for arm in self.arms)

    @property
    def comparisons(self) -> list[tuple[Arm, Arm]]:
        """Every arm with the baseline, and every further treated arm with the first treated one.

        Treated arms have other formats than the baseline; between them the question is which one to take.
        """
        base, *others = self.all_arms
        pairs = [(arm, base) for arm in others]
        treated = treated_arms(self.all_arms)
        return pairs + [(arm, treated[0]) for arm in treated[1:]]

    @property
    def emits(self) -> int:
        """Most tokens that a prompt is continued by."""
        assert self.steps is not None
        return most_tokens(self.steps, self.num_draft_tokens)

    @property
    def max_length(self) -> int:
        """Most tokens that a request can hold."""
        assert self.lengths is not None
        return self.lengths[-1] + self.emits

    def resolve(self) -> ThroughputConfig:
        """The same configuration with every choice made: what a result folder belongs to.

        Raises:
            InputError: CUDA was asked for and there is none.
        """
        chosen = choose_by_device(self, self.BY_DEVICE)
        assert chosen.builds is not None and chosen.num_prompts is not None
        return replace(chosen, builds=min(chosen.builds, chosen.num_prompts))


_LEAST = {
    "public_layers": 0,
    "num_prompts": 1,
    "steps": 1,
    "builds": 1,
    "temperature": 0,
    "prefill_chunk": 1,
    "prefix_interval": 0,
    "calibration_tokens": 1,
    "resamples": 100,
    "seed": 0,
}
