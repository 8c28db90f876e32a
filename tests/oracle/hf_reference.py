"""What transformers' Qwen4Exp computes, with one tie rule and a measure of how safe the comparison is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpForCausalLM,
    Qwen4ExpTextQSAIndexer,
    Qwen4ExpTextTopKRouter,
)

from .tiny import randomise

SAFE_MARGIN = 2e-5


@dataclass(frozen=True)
class Reference:
    """What transformers computes for one sequence.

    Attributes:
        logits: ``[T, V]``.
        streams: ``[T, S*H]``, the residual that enters the final mixer.
        margin: smallest gap, over all rows, between the last value a top-k kept and the first it dropped
            (index blocks and experts; exact ties of index scores are no gap, their rule is exact). Rounding
            differences far below the margin cannot change which block or expert is used.
    """

    logits: Tensor
    streams: Tensor
    margin: float


def hf_config(values: dict[str, Any]) -> Qwen4ExpTextConfig:
    """A transformers config of the contents of a ``config.json``."""
    return Qwen4ExpTextConfig(**{k: v for k, v in values.items() if k != "model_type"})


def hf_model(values: dict[str, Any], seed: int = 0) -> Qwen4ExpForCausalLM:
    """A transformers model with the random weights of :func:`tests.oracle.tiny.randomise`, in FP32."""
    config = hf_config(values)
    config._attn_implementation = "sdpa"
    model = Qwen4ExpForCausalLM(config).eval().float()
    randomise(model, seed)
    return model.requires_grad_(False)


@torch.no_grad()
def run(model: Qwen4ExpForCausalLM, token_ids: list[int]) -> Reference:
    """One full forward pass without a cache."""
    seen: dict[str, Tensor] = {}
    hook = model.model.hyper_connection_mixer.register_forward_pre_hook(
        lambda _, args: seen.__setitem__("streams", args[0][0])
    )
    try:
        with lower_index_first(model) as margins:
            logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    finally:
        hook.remove()
    return Reference(logits, seen["streams"], min(margins, default=float("inf")))


def safe_tokens(model: Qwen4ExpForCausalLM, propose: Any, attempts: int = 50) -> tuple[list[int], Reference]:
    """The first of the sequences ``propose(0), propose(1), ...`` whose selections rounding cannot change."""
    for attempt in range(attempts):
        tokens = propose(attempt)
        reference = run(model, tokens)
        if reference.margin > SAFE_MARGIN:
            return tokens, reference
    raise AssertionError(f"no sequence among {attempts} with a selection margin above {SAFE_MARGIN}")


@contextmanager
def lower_index_first(model: nn.Module) -> Iterator[list[float]]:
    """Makes the indexer's top-k prefer the lower block at equal scores, and collects selection margins.

    ``Tensor.topk`` leaves the order of equal values open, and ReLU scores are often exactly 0. Inside the
    indexer's forward, a stable descending sort takes its place.
    """
    margins: list[float] = []
    original = Tensor.topk

    def stable_topk(scores: Tensor, k: int, dim: int = -1, **_: Any) -> Any:
        ordered = scores.sort(dim=dim, descending=True, stable=True)
        if k < scores.shape[dim]:
            gap = float(ordered.values[k - 1] - ordered.values[k])
            if gap > 0:
                margins.append(gap)
        return torch.return_types.topk((ordered.values[:k], ordered.indices[:k]))

    def enter(*_: Any) -> None:
        Tensor.topk = stable_topk  # type: ignore[method-assign,assignment]

    def leave(*_: Any) -> None:
        Tensor.topk = original  # type: ignore[method-assign]

    def watch_router(router: Any, _: Any, output: Any) -> None:
        if router.top_k < router.num_experts:
            ordered = output[0].float().softmax(-1).sort(-1, descending=True).values
            margins.append(float((ordered[:, router.top_k - 1] - ordered[:, router.top_k]).min()))

    hooks = []
    for module in model.modules():
        if isinstance(module, Qwen4ExpTextQSAIndexer):
            hooks += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave, always_call=True),
            ]
        elif isinstance(module, Qwen4ExpTextTopKRouter):
            hooks.append(module.register_forward_hook(watch_router))
    try:
        yield margins
    finally:
        leave()
        for hook in hooks:
            hook.remove()
