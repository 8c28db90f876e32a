"""Configuration of the kernel bench."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch

from page4.experiments.config_checks import check_least
from page4.experiments.device import resolve_device
from page4.kernels.block_plan import MAX_GROUP_ROWS
from page4.kernels.codecs import check_kv_format
from page4.kernels.errors import InputError

Kernel = Literal[
    "qsa_prepare",
    "index_scores",
    "block_select",
    "page4_attention",
    "planned_attention",
    "prefill",
    "gated_delta",
    "gated_delta_prefill",
    "mtp_verify",
    "mtp_verify_sampled",
    "mtp_verify_filtered",
]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)

AttentionImplementation = Literal["gluon", "triton", "pytorch", "vllm"]
Implementation = Literal[AttentionImplementation, "scan"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


@dataclass(frozen=True)
class BenchConfig:
    """What is timed, at which shapes, and how.

    The first value of every axis is the centre of the sweep: with ``sweep=axes`` one axis at a time leaves
    it, with ``sweep=product`` all combinations are measured. A kernel ignores the axes that it does not know.

    Attributes:
        kernels: ``qsa_prepare`` (the K/V write), ``index_scores``, ``block_select`` (selection and plan),
            ``page4_attention`` (attention and merge), ``planned_attention`` (plan, attention and merge),
            ``prefill`` (attention and merge of whole prompts, rows in groups of 8), ``gated_delta`` (a linear
            layer of the public model between its projections), ``gated_delta_prefill`` (the same of whole
            prompts), ``mtp_verify`` (verification of greedy drafts over the public model's vocabulary, by
            greedy requests), ``mtp_verify_sampled`` (by sampling ones) and ``mtp_verify_filtered`` (top-k,
            top-p and sampled drafts).
        implementations: of attention: ``gluon``, ``triton``, ``pytorch`` (gather and SDPA) and ``vllm`` (its
            sparse decode kernel, where that package is installed). A linear layer's prompts have ``triton``
            (the form that the model gets) and ``scan`` (row after row). Other kernels have ``triton`` alone.
        device: ``auto`` and ``cuda`` are the same: only a GPU is timed.
        kernel_configs: tuned configurations of the kernels: those ``shipped`` with the package, a folder that
            ``page4 autotune`` wrote, or ``defaults``: none.
        seed: of all random inputs.
        bars: measure the cells that have a goal, in e4m3 and fp16.
        sweep: see above; ``none`` leaves the cells with goals.
        requests, rows, contexts, overlaps, formats: axes of decoding steps.
        heads: (query heads, KV heads) each.
        prepare_rows: prompt lengths of the K/V write, besides decoding steps.
        prefill_lengths: prompt lengths of ``prefill`` and ``gated_delta_prefill``.
        head_dim: D.
        topk: blocks that a row selects.
        replays: graph replays, each a sample of the time.
        max_copies: most copies of a case that caches rotate through.
        check_groups: groups of rows, chosen at random, that are compared with float64; 0 means all.
    """

    kernels: tuple[Kernel, ...] = KERNELS
    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS
    device: Literal["auto", "cuda"] = "auto"
    kernel_configs: Literal["shipped", "defaults"] | Path = "shipped"
    seed: int = 0
    bars: bool = True
    sweep: Literal["none", "axes", "product"] = "axes"
    requests: tuple[int, ...] = (16, 1, 4, 64, 128)
    rows: tuple[int, ...] = (4, 1)
    heads: tuple[tuple[int, int], ...] = ((24, 2), (6, 1))
    contexts: tuple[int, ...] = (32768, 2048, 8192, 131072, 262144)
    overlaps: tuple[float, ...] = (0.9, 0.5, 1.0)
    formats: tuple[str, ...] = ("e4m3", "fp16", "e5m2", "e3m4", "e2m5", "int8")
    prepare_rows: tuple[int, ...] = (8192,)
    prefill_lengths: tuple[int, ...] = (8192, 32768)
    head_dim: int = 256
    topk: int = 512
    replays: int = 30
    max_copies: int = 1536
    check_groups: int = 8

    QUICK: ClassVar[dict[str, Any]] = {
        "bars": False,
        "requests": (2,),
        "rows": (4,),
        "heads": ((6, 1),),
        "contexts": (4096,),
        "overlaps": (0.9,),
        "formats": ("e4m3", "fp16"),
        "prepare_rows": (512,),
        "prefill_lengths": (2048,),
        "replays": 10,
    }

    def __post_init__(self) -> None:
        """Refuse what no kernel can run."""
        for name in ("kernels", "implementations", "requests", "rows", "heads", "contexts", "overlaps"):
            if not getattr(self, name):
                raise InputError(f"{name} must name at least one value")
        for name in ("requests", "rows", "contexts", "prepare_rows", "prefill_lengths"):
            if any(value < 1 for value in getattr(self, name)):
                raise InputError(f"{name} must be positive, got {', '.join(map(str, getattr(self, name)))}")
        if max(self.rows) > MAX_GROUP_ROWS:
            raise InputError(f"rows of a decoding step are 1..{MAX_GROUP_ROWS}, got {max(self.rows)}")
        if min(self.contexts) < max(self.rows):
            raise InputError(
                f"{max(self.rows)} rows do not fit into a context of {min(self.contexts)} tokens"
            )
        if any(query < 1 or kv < 1 or query % kv for query, kv in self.heads):
            raise InputError(f"heads are pairs (query, KV) with query a multiple of KV, got {self.heads}")
        if any(not 0 <= overlap <= 1 for overlap in self.overlaps):
            raise InputError(f"overlaps must lie in 0..1, got {', '.join(map(str, self.overlaps))}")
        if not self.formats:
            raise InputError("formats must name at least one KV format")
        for kv_format in self.formats:
            check_kv_format(kv_format)
        check_least(self, {"seed": 0, "replays": 1, "max_copies": 1, "check_groups": 0, "topk": 1})

    def resolve(self) -> BenchConfig:
        """The same configuration with the device chosen: what a result folder belongs to.

        Raises:
            InputError: there is no GPU.
        """
        if not torch.cuda.is_available():
            raise InputError("page4 bench times kernels on a CUDA GPU, and PyTorch sees none")
        assert resolve_device(self.device).type == "cuda"
        return dataclasses.replace(self, device="cuda")
