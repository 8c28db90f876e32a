"""Configuration of the bench of restored prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from page4.experiments.config_checks import check_least, choose_by_device
from page4.kernels.errors import InputError
from page4.kvcache import get_format
from page4.kvcache.prefix_cache import PrefixConfig
from page4.spec_decode.engine import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class RestoreBenchConfig:
    """Which prefixes are brought back from the host, beside what.

    Attributes:
        public_layers: the first so many layers of the public checkpoint's geometry and its MTP head, with
            random weights: times mean something, text does not. 0: a checkpoint. By default 8 on a GPU
            unless there is a `model`, and 0 on a CPU.
        model: folder of the checkpoint, without `public_layers`; the shipped one by default.
        device: ``auto`` takes a GPU when there is one.
        backend: ``reference`` or ``triton``; by default what the device has.
        kernel_configs: as for the other benches.
        seed: of weights and tokens.
        formats: KV formats, of target and draft alike.
        length: tokens of the prefix.
        interval: tokens between snapshots, and of a group in the host tier.
        others: requests that decode meanwhile.
        other_length: tokens of their prompts.
        num_draft_tokens: K.
        prefill_chunk: tokens of a prefill step.
        restores: how often the prefix is brought back alone.
        turns: how often decoding with and without restores take turns.
        steps: timed decode steps of a turn.
    """

    public_layers: int | None = None
    model: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["reference", "triton"] | None = None
    kernel_configs: Literal["shipped", "defaults"] | Path = "shipped"
    seed: int = 0
    formats: tuple[str, ...] = ("fp16", "e4m3")
    length: int = 32768
    interval: int = 8192
    others: int = 3
    other_length: int = 1024
    num_draft_tokens: int = 3
    prefill_chunk: int = 2048
    restores: int = 10
    turns: int = 4
    steps: int = 30

    QUICK: ClassVar[dict[str, Any]] = {
        "public_layers": 0,
        "length": 256,
        "interval": 128,
        "other_length": 32,
        "prefill_chunk": 64,
        "restores": 3,
        "turns": 1,
        "steps": 4,
    }
    BY_DEVICE: ClassVar[Mapping[str, dict[str, Any]]] = {
        "cpu": {"backend": "reference", "public_layers": 0},
        "cuda": {"backend": "triton", "public_layers": 8},
    }

    def __post_init__(self) -> None:
        """Refuse what can be refused without the model."""
        if self.model is not None and self.public_layers:
            raise InputError("model and public_layers exclude each other: a checkpoint, or random weights")
        if not self.formats or len(set(self.formats)) < len(self.formats):
            raise InputError("formats must name at least one, and none twice")
        for kv_format in self.formats:
            get_format(kv_format)
        if not 0 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(f"num_draft_tokens must be 0 to {MAX_DRAFT_TOKENS}, got {self.num_draft_tokens}")
        check_least(self, {"public_layers": 0, "seed": 0, **dict.fromkeys(_COUNTS, 1)})
        PrefixConfig(interval=self.interval).check_chunk(self.prefill_chunk)
        if self.length % self.prefill_chunk:
            raise InputError(f"length is {self.length}, expected whole chunks of {self.prefill_chunk}")

    @property
    def max_length(self) -> int:
        """Most tokens that a request can hold."""
        emitted = (2 * self.turns * (self.steps + 4) + 2) * (self.num_draft_tokens + 1)
        return max(self.length + 1, self.other_length + emitted)

    def resolve(self) -> RestoreBenchConfig:
        """The same configuration with every choice made: what a result folder belongs to.

        Raises:
            InputError: CUDA was asked for and there is none.
        """
        given = self if self.model is None else dataclasses.replace(self, public_layers=0)
        return choose_by_device(given, self.BY_DEVICE)


_COUNTS = (
    "length", "interval", "others", "other_length", "prefill_chunk", "restores", "turns", "steps",
)  # fmt: skip
