"""Configuration of the prediction of a V100's attention times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from page4.experiments.config_checks import check_least
from page4.kernels.block_plan import MAX_GROUP_ROWS
from page4.kernels.codecs import check_kv_format
from page4.kernels.errors import InputError

Implementation = Literal["gluon", "triton"]
StepKernel = Literal["prepare", "scores", "select", "verify", "gdn"]

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


@dataclass(frozen=True)
class PredictConfig:
    """Which steps are predicted, and from how much of each.

    All combinations of ``rows``, ``heads`` and ``requests`` are predicted in the first of ``formats``, and in
    the other formats those with the first of ``requests``.

    Attributes:
        implementations: of attention: ``gluon`` (tensor cores) and ``triton`` (plain ``tl.dot``).
        kernel_configs: tuned configurations of the kernels: those ``shipped`` with the package for a V100, a
            folder, or ``defaults``: none.
        requests: of a step.
        rows: of a request: 1 decodes, 4 verify three drafts.
        heads: (query heads, KV heads) each.
        formats: of K and V.
        step_kernels: other calls of a step, at all ``rows`` and ``requests`` with the first of ``heads`` and
            ``formats``: ``prepare`` (the K/V write), ``scores``, ``select`` with its plan, ``verify`` over
            logits of 248,320 tokens, and ``gdn``, a Gated DeltaNet layer of 48/16 heads of 128 x 128.
        step_context: tokens of a request for those.
        context: tokens of a request; beyond what the selected blocks need it changes nothing.
        overlap: share of a row's blocks that all rows of its request select.
        head_dim: D.
        topk: blocks that a row selects.
        sampled_requests: whose programs are emulated; the others repeat them on memory of their own.
        plain_blocks: programs of plain ``tl.dot`` that are emulated at most: they execute ten times as many
            instructions. Their merge finds less in L2 for it.
        most_replayed_requests: larger steps are replayed as a half, a quarter or an eighth of their requests
            on as much of the machine.
        seed: of all random inputs.
    """

    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS
    kernel_configs: Literal["shipped", "defaults"] | Path = "shipped"
    requests: tuple[int, ...] = (16, 1, 4, 64)
    rows: tuple[int, ...] = (4, 1)
    heads: tuple[tuple[int, int], ...] = ((6, 1), (24, 2))
    formats: tuple[str, ...] = ("e4m3", "fp16", "e5m2", "e3m4", "e2m5", "int8")
    step_kernels: tuple[StepKernel, ...] = get_args(StepKernel)
    step_context: int = 32768
    context: int = 8192
    overlap: float = 0.9
    head_dim: int = 256
    topk: int = 512
    sampled_requests: int = 1
    plain_blocks: int = 4
    most_replayed_requests: int = 4
    seed: int = 0

    QUICK: ClassVar[dict[str, Any]] = {
        "requests": (4,),
        "rows": (4,),
        "heads": ((6, 1),),
        "formats": ("e4m3", "fp16"),
        "step_kernels": ("prepare",),
        "step_context": 1024,
        "context": 1024,
        "topk": 64,
    }

    def __post_init__(self) -> None:
        """Refuse what no kernel can run."""
        for name in ("implementations", "requests", "rows", "heads", "formats"):
            values = getattr(self, name)
            if not values:
                raise InputError(f"{name} must name at least one value")
            if len(set(values)) < len(values):
                raise InputError(f"{name} names a value twice: {', '.join(map(str, values))}")
        for name in ("requests", "rows"):
            if min(getattr(self, name)) < 1:
                raise InputError(f"{name} must be positive, got {', '.join(map(str, getattr(self, name)))}")
        if max(self.rows) > MAX_GROUP_ROWS:
            raise InputError(f"rows of a step are 1..{MAX_GROUP_ROWS}, got {max(self.rows)}")
        if any(query < 1 or kv < 1 or query % kv for query, kv in self.heads):
            raise InputError(f"heads are pairs (query, KV) with query a multiple of KV, got {self.heads}")
        for kv_format in self.formats:
            check_kv_format(kv_format)
        if not 0 <= self.overlap <= 1:
            raise InputError(f"overlap must lie in 0..1, got {self.overlap}")
        for context in (self.context, self.step_context):
            if context < max(self.rows):
                raise InputError(f"{max(self.rows)} rows do not fit into a context of {context} tokens")
        positive = ("topk", "sampled_requests", "plain_blocks", "most_replayed_requests")
        check_least(self, dict.fromkeys(positive, 1) | {"seed": 0})
