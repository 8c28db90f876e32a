"""Configuration of the acceptance study."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from page4.experiments.config_checks import check_confidence, check_least, check_lengths, choose_by_device
from page4.kernels.errors import InputError
from page4.kvcache import LayerFormats
from page4.kvcache.layer_formats import draft_format
from page4.spec_decode import SamplingOptions
from page4.spec_decode.engine import MAX_DRAFT_TOKENS


class Arm(NamedTuple):
    """One condition of the study.

    Attributes:
        name: What tables and figures call it.
        target_format: KV format of the target's QSA layers, of all or by layer ("e4m3,3:fp16").
        draft_format: KV format of the MTP layer.
        nonce_id: Arms with the same number see the same prompts; another number changes every prompt's nonce.
    """

    name: str
    target_format: str
    draft_format: str
    nonce_id: int

    @property
    def formats(self) -> tuple[str, str]:
        """The target's and the draft's format."""
        return self.target_format, self.draft_format

    @property
    def format_names(self) -> list[str]:
        """Every format that occurs in it."""
        return list(dict.fromkeys([*LayerFormats(self.target_format).names, self.draft_format]))


def treated_arms(arms: Sequence[Arm]) -> list[Arm]:
    """The arms whose formats differ from those of the first, the baseline."""
    return [arm for arm in arms if arm.formats != arms[0].formats]


@dataclass(frozen=True)
class AcceptanceConfig:
    """What is measured, on what, and how often. Fields that are None are chosen by device, see `resolve`.

    Attributes:
        model: Checkpoint folder; None is the one that comes with the package.
        prompts: Folder of `.txt` files; None is the held-out texts that come with the package.
        texts: Names of the texts to use; empty means all.
        device: "auto" is CUDA when there is one.
        backend: Implementation of the sparse layers: "triton" kernels (None on CUDA) or PyTorch "reference".
        kernel_configs: Tuned configurations of the kernels: those "shipped" with the package, a folder that
            `page4 autotune` wrote, or "defaults": none.
        seed: Decides anchors, nonces and resampling.
        arms: (name, target format, draft format, nonce id) each. The first is the baseline. An arm with the
            baseline's formats and another nonce is an A/A control: what it differs by is noise.
        lengths: Context lengths in tokens, ascending, nonce included.
        num_prompts: Anchors, the same ones at every length, as far as `prompt_tokens` goes.
        prompt_tokens: Tokens that the prompts of one length may have together: long ones are then fewer, the
            first of the same prompts, but at least one. 0 means no limit.
        rounds_per_prompt: Speculative rounds from each prompt.
        round_stride: Tokens of real text between two rounds.
        batch_size: Prompts measured together.
        num_draft_tokens: K, drafts per round. Drafts are made one after another, so rounds of K hold those of
            fewer: the table of numbers of drafts needs one run.
        temperature: Of tokens; 0 is greedy. A prompt draws the same random numbers in every arm.
        sample_drafts: At a temperature above 0, draft from the head's distribution, not its argmax.
        prefill_chunk: Tokens per prefill step.
        scales: Static scales: calibrated from the beginnings of the "prompts", the "shipped" checkpoint's
            overlay, or an overlay's folder.
        allow_unit_target_scales: With an overlay that has no target scales, take 1.0 for all of them.
        calibration_tokens: How much of each prompt's beginning the KV scales are calibrated from.
        generation_prompts: Prompts per length that are continued freely, one at a time.
        generation_max_length: Longest context that is continued; 0 means every one.
        generation_tokens: New tokens of such a continuation.
        max_repeated_4grams: A continuation in which more of the 4-grams are repetitions counts as degenerate:
            it is left out of the free-running acceptance, and counted.
        check_prompts: Prompts whose speculative output is compared with plain greedy decoding.
        resamples: Bootstrap resamples.
        confidence: Coverage of the intervals.
    """

    model: Path | None = None
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
    prompt_tokens: int | None = None
    rounds_per_prompt: int | None = None
    round_stride: int = 16
    batch_size: int | None = None
    num_draft_tokens: int = 3
    temperature: float = 0.0
    sample_drafts: bool = True
    prefill_chunk: int = 2048
    scales: Literal["prompts", "shipped"] | Path = "prompts"
    allow_unit_target_scales: bool = False
    calibration_tokens: int = 512
    generation_prompts: int | None = None
    generation_max_length: int | None = None
    generation_tokens: int = 64
    max_repeated_4grams: float = 0.2
    check_prompts: int = 2
    resamples: int = 10_000
    confidence: float = 0.95

    QUICK: ClassVar[dict[str, Any]] = {
        "lengths": (512, 1024),
        "rounds_per_prompt": 6,
        "generation_prompts": 1,
        "generation_tokens": 32,
        "check_prompts": 1,
    }
    BY_DEVICE: ClassVar[Mapping[str, dict[str, Any]]] = {
        "cpu": {
            "backend": "reference",
            "lengths": (1024, 2048, 4096, 8192, 16384),
            "num_prompts": 6,
            "prompt_tokens": 12288,
            "rounds_per_prompt": 16,
            "batch_size": 1,
            "generation_prompts": 1,
            "generation_max_length": 2048,
        },
        "cuda": {
            "backend": "triton",
            "lengths": (1024, 2048, 4096, 8192, 16384, 32768),
            "num_prompts": 96,
            "prompt_tokens": 0,
            "rounds_per_prompt": 32,
            "batch_size": 32,
            "generation_prompts": 8,
            "generation_max_length": 0,
        },
    }

    def __post_init__(self) -> None:
        """Refuse what can be refused without looking at the checkpoint, the texts or the device."""
        _check_arms(self.all_arms)
        check_lengths(self.lengths)
        if not 1 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(f"num_draft_tokens must be 1 to {MAX_DRAFT_TOKENS}, got {self.num_draft_tokens}")
        check_least(self, _LEAST)
        self.sampling(0)
        if not 0 <= self.max_repeated_4grams <= 1:
            raise InputError(f"max_repeated_4grams must be between 0 and 1, got {self.max_repeated_4grams}")
        check_confidence(self.confidence)

    @property
    def all_arms(self) -> tuple[Arm, ...]:
        """The arms by field name, the baseline first."""
        return tuple(Arm(*arm) for arm in self.arms)

    def sampling(self, prompt: int) -> SamplingOptions:
        """How a prompt chooses its tokens, in every arm.

        Raises:
            InputError: The temperature is out of range.
        """
        seed = zlib.crc32(f"{self.seed}:{prompt}".encode())
        return SamplingOptions(self.temperature, seed=seed, sample_drafts=self.sample_drafts)

    @property
    def kind_of_rounds(self) -> str:
        """How rounds choose tokens, in words."""
        if not self.temperature:
            return "greedy rounds"
        drafts = "sampled" if self.sample_drafts else "greedy"
        return f"rounds at temperature {self.temperature:g} with {drafts} drafts"

    @property
    def baseline(self) -> Arm:
        """The arm that the others are compared with."""
        return self.all_arms[0]

    @property
    def controls(self) -> list[Arm]:
        """The A/A arms: the baseline's formats again."""
        return [arm for arm in self.all_arms[1:] if arm.formats == self.baseline.formats]

    @property
    def treated(self) -> list[Arm]:
        """The arms whose formats differ from the baseline's."""
        return treated_arms(self.all_arms)

    def prefixes(self, length: int) -> list[int]:
        """Lengths of the prefixes of a prompt that rounds start from, of a resolved configuration."""
        assert self.rounds_per_prompt is not None
        return [length + turn * self.round_stride for turn in range(self.rounds_per_prompt)]

    @property
    def rounds_span(self) -> int:
        """Tokens of real text between the first and the last prefix of a prompt."""
        assert self.rounds_per_prompt is not None
        return (self.rounds_per_prompt - 1) * self.round_stride

    def prompts_at(self, length: int) -> int:
        """How many prompts a length has, of a resolved configuration."""
        assert self.num_prompts is not None and self.prompt_tokens is not None
        affordable = self.prompt_tokens // length if self.prompt_tokens else self.num_prompts
        return max(1, min(self.num_prompts, affordable))

    @property
    def most_prompts(self) -> int:
        """Prompts of the shortest length, which no other has more of, of a resolved configuration."""
        assert self.lengths is not None
        return self.prompts_at(self.lengths[0])

    @property
    def fewest_prompts(self) -> int:
        """Prompts of the longest length, of a resolved configuration."""
        assert self.lengths is not None
        return self.prompts_at(self.lengths[-1])

    @property
    def lengths_are_paired(self) -> bool:
        """Whether every length has the same prompts, so that lengths can be compared as well as arms."""
        return self.most_prompts == self.fewest_prompts

    @property
    def max_length(self) -> int:
        """Most tokens that a request can hold."""
        assert self.lengths is not None
        return self.lengths[-1] + max(self.rounds_span, self.generation_tokens) + self.num_draft_tokens + 1

    def resolve(self) -> AcceptanceConfig:
        """The same configuration with every choice made: what a result folder belongs to.

        Raises:
            InputError: CUDA was asked for and there is none.
        """
        return choose_by_device(self, self.BY_DEVICE)


_LEAST = {
    "num_prompts": 1,
    "prompt_tokens": 0,
    "rounds_per_prompt": 1,
    "round_stride": 1,
    "batch_size": 1,
    "prefill_chunk": 1,
    "calibration_tokens": 1,
    "generation_prompts": 0,
    "generation_max_length": 0,
    "generation_tokens": 1,
    "check_prompts": 0,
    "resamples": 100,
    "seed": 0,
}


def _check_arms(arms: tuple[Arm, ...]) -> None:
    if not arms:
        raise InputError("arms must name at least one arm: [name, target format, draft format, nonce id]")
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names) or "" in names:
        raise InputError(f"every arm needs a name of its own, got {', '.join(names)}")
    for arm in arms:
        draft_format(LayerFormats(arm.target_format), arm.draft_format)
        if arm.nonce_id != arms[0].nonce_id and arm.formats != arms[0].formats:
            raise InputError(
                f"arm {arm.name!r} differs from {arms[0].name!r} in nonce and in formats, so its difference "
                "would have two causes: give it the same nonce id"
            )
