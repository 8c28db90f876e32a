"""Configuration of the step bench."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from page4.experiments.config_checks import check_least, choose_by_device
from page4.kernels.errors import InputError
from page4.kvcache import get_format
from page4.spec_decode.engine import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class StepBenchConfig:
    """Which decode steps are timed.

    Attributes:
        model: folder of the checkpoint; the shipped one by default.
        device: ``auto`` takes a GPU when there is one.
        backend: ``reference`` or ``triton``; by default what the device has.
        kernel_configs: as for the other benches.
        texts: folder of the texts; the shipped ones by default.
        seed: of the texts' places.
        formats: KV formats, of target and draft alike. They take turns in every cell.
        lengths: tokens in the cache when timing starts; by default fewer on a CPU.
        batches: requests; by default fewer on a CPU.
        num_draft_tokens: K; 0 times plain decoding.
        turns: how often each format has its turn.
        steps: timed steps of a turn.
        prefill_chunk: prompt tokens per step of the prefill.
    """

    model: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["reference", "triton"] | None = None
    kernel_configs: Literal["shipped", "defaults"] | Path = "shipped"
    texts: Path | None = None
    seed: int = 0
    formats: tuple[str, ...] = ("fp16", "e4m3")
    lengths: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    num_draft_tokens: int = 3
    turns: int = 4
    steps: int = 25
    prefill_chunk: int = 2048

    QUICK: ClassVar[dict[str, Any]] = {"lengths": (256,), "batches": (1, 2), "turns": 1, "steps": 3}
    BY_DEVICE: ClassVar[Mapping[str, dict[str, Any]]] = {
        "cpu": {"backend": "reference", "lengths": (1024, 4096), "batches": (1, 4)},
        "cuda": {
            "backend": "triton",
            "lengths": (1024, 2048, 4096, 8192, 16384, 32000),
            "batches": (1, 8, 64),
        },
    }

    def __post_init__(self) -> None:
        """Refuse what can be refused without the checkpoint."""
        for name in ("formats", "lengths", "batches"):
            if getattr(self, name) == ():
                raise InputError(f"{name} must name at least one value")
        for kv_format in self.formats:
            get_format(kv_format)
        for name in ("lengths", "batches"):
            values = getattr(self, name) or (1,)
            if min(values) < 1:
                raise InputError(f"{name} must be positive, got {', '.join(map(str, values))}")
        if not 0 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(f"num_draft_tokens must be 0 to {MAX_DRAFT_TOKENS}, got {self.num_draft_tokens}")
        check_least(self, {"seed": 0, "turns": 1, "steps": 1, "prefill_chunk": 1})

    @property
    def tokens_emitted(self) -> int:
        """Most tokens that a request gets in a cell, with the steps before the timed ones."""
        return (self.turns * (self.steps + 5) + 2) * (self.num_draft_tokens + 1)

    def resolve(self) -> StepBenchConfig:
        """The same configuration with every choice made: what a result folder belongs to.

        Raises:
            InputError: CUDA was asked for and there is none.
        """
        return choose_by_device(self, self.BY_DEVICE)
