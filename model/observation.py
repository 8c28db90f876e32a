"""What goes into and comes out of the sparse layers of a model, seen without changing what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from page4.kvcache.cache import QSALayerCache

from .causal_lm import Qwen4ExpForCausalLM
from .decoder import DecoderLayer
from .qsa import QSAttention
from .step import Step

DRAFT_LAYER = "draft"
"""Name of the MTP head's sparse layer; the target's go by their index."""


@dataclass(frozen=True)
class SparseCall:
    """One call of a sparse layer.

    Attributes:
        attention: the layer.
        x: ``[N, H]``, the rows that it was given.
        step: their step.
        cache: what it wrote its K, V and index keys to and read them from.
        output: ``[N, H]``, what it returned.
    """

    attention: QSAttention
    x: Tensor
    step: Step
    cache: QSALayerCache
    output: Tensor


def sparse_layers(model: Qwen4ExpForCausalLM) -> dict[str, QSAttention]:
    """The sparse layers in the order in which they run, by index, then the MTP head's as ``draft``."""
    heads = [] if model.mtp is None else [(DRAFT_LAYER, model.mtp.layers[0])]
    found = {}
    for name, layer in [*((str(i), layer) for i, layer in enumerate(model.model.layers)), *heads]:
        assert isinstance(layer, DecoderLayer)
        if layer.self_attn is not None:
            found[name] = layer.self_attn
    return found


@contextmanager
def sparse_calls(model: Qwen4ExpForCausalLM) -> Iterator[dict[str, SparseCall]]:
    """Collect the calls of the sparse layers while the context is open, the last one of each by name.

    Rows of captured steps are not seen: a replay calls no layer.
    """
    calls: dict[str, SparseCall] = {}

    def keep(name: str, module: nn.Module, arguments: tuple[Tensor, Step, QSALayerCache], y: Tensor) -> None:
        assert isinstance(module, QSAttention)
        calls[name] = SparseCall(module, *arguments, y)

    hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in sparse_layers(model).items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
