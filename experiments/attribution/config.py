"""Configuration of the attribution study."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from page4.experiments.acceptance.config import AcceptanceConfig
from page4.experiments.attribution.arms import GROUPS, Condition, check_groups, study_conditions
from page4.experiments.config_checks import choose_by_device
from page4.kernels.errors import InputError
from page4.kvcache import get_format


@dataclass(frozen=True)
class AttributionConfig:
    """What is attributed, and how it is measured. Fields that are None are chosen by device, see `resolve`.

    The sparse layers run on the reference backend, which is where K and V can be intervened in. Rounds and
    prompts are those of `page4 acceptance`; see there for what is not said here.

    Attributes:
        model: Checkpoint folder; None is the one that comes with the package.
        prompts: Folder of `.txt` files; None is the held-out texts that come with the package.
        texts: Names of the texts to use; empty means all.
        device: "auto" is CUDA when there is one.
        seed: Decides anchors, nonces, noise and resampling.
        kv_format: The format whose loss is attributed, one with static scales.
        groups: The questions to ask: "place", "noise", "scale", "choice", "formats".
        lengths: Context lengths in tokens, ascending, nonce included. Up to the model's budget of blocks a
            row attends to everything, and the choice of blocks cannot matter.
        num_prompts: Anchors, the same ones at every length.
        rounds_per_prompt: Speculative rounds from each prompt.
        round_stride: Tokens of real text between two rounds.
        batch_size: Prompts measured together.
        num_draft_tokens: K, drafts per round.
        prefill_chunk: Tokens per prefill step.
        calibration_tokens: How much of each prompt's beginning scales and noise are calibrated from.
        resamples: Bootstrap resamples.
        confidence: Coverage of the intervals.
    """

    model: Path | None = None
    prompts: Path | None = None
    texts: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    kv_format: str = "e4m3"
    groups: tuple[str, ...] = GROUPS
    lengths: tuple[int, ...] | None = None
    num_prompts: int | None = None
    rounds_per_prompt: int | None = None
    round_stride: int = 16
    batch_size: int | None = None
    num_draft_tokens: int = 3
    prefill_chunk: int = 2048
    calibration_tokens: int = 512
    resamples: int = 10_000
    confidence: float = 0.95

    QUICK: ClassVar[dict[str, Any]] = {
        "lengths": (192,),
        "num_prompts": 2,
        "rounds_per_prompt": 3,
        "batch_size": 2,
        "calibration_tokens": 128,
    }
    BY_DEVICE: ClassVar[Mapping[str, dict[str, Any]]] = {
        "cpu": {"lengths": (1024,), "num_prompts": 8, "rounds_per_prompt": 8, "batch_size": 4},
        "cuda": {"lengths": (4096, 16384), "num_prompts": 32, "rounds_per_prompt": 16, "batch_size": 32},
    }

    def __post_init__(self) -> None:
        """Refuse what can be refused without looking at the checkpoint, the texts or the device."""
        if not get_format(self.kv_format).needs_scale:
            raise InputError(f"kv_format {self.kv_format} has no static scales to study: name one that has")
        check_groups(self.groups)
        self.rounds(self.conditions(()))

    def conditions(self, layers: Sequence[int]) -> list[Condition]:
        """Every condition, for a model with these QSA layers; the baseline comes first."""
        return study_conditions(self.kv_format, self.groups, layers)

    def rounds(self, conditions: Sequence[Condition]) -> AcceptanceConfig:
        """The rounds of these conditions as the acceptance study measures them.

        Raises:
            InputError: a field is out of range.
        """
        shared = {field.name for field in dataclasses.fields(AcceptanceConfig)}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in shared}
        return AcceptanceConfig(
            **values,
            backend="reference",
            arms=tuple(condition.arm for condition in conditions),
            prompt_tokens=0,
            generation_prompts=0,
            generation_tokens=1,
            check_prompts=0,
        )

    def resolve(self) -> AttributionConfig:
        """The same configuration with every choice made: what a result folder belongs to.

        Raises:
            InputError: CUDA was asked for and there is none.
        """
        return choose_by_device(self, self.BY_DEVICE)
