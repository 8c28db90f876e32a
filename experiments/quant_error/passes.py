"""One prompt on its way through a model: unquantised, in an arm's format, and layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from page4.kvcache import CacheConfig, KVScales
from page4.kvcache.cache import HybridCache, QSALayerCache
from page4.model import Qwen4ExpForCausalLM, RowBatch
from page4.model.observation import SparseCall, sparse_calls, sparse_layers
from page4.model.step import Step


@dataclass(frozen=True)
class Passage:
    """What came out of a chunk's rows.

    Attributes:
        calls: Calls of the sparse layers by name.
        streams: `[N, S*H]` of the target, before its final mixer.
        draft_streams: `[N, S*H]` of the first draft step; None without an MTP head.
    """

    calls: dict[str, SparseCall]
    streams: Tensor
    draft_streams: Tensor | None


class Pass:
    """The model with a cache of its own, for one request in row 0.

    Args:
        kv_format: Format of target and draft; None stores K and V in the activations' own dtype.
        length: Tokens of the request.
    """

    def __init__(
        self, model: Qwen4ExpForCausalLM, length: int, kv_format: str | None, scales: KVScales | None = None
    ) -> None:
        self._model = model
        self.cache = _new_cache(model, length, kv_format, scales)

    def advance(self, batch: RowBatch, drafting: RowBatch) -> Passage:
        """Run the next chunk; `drafting` has the same rows with the token that follows each."""
        with sparse_calls(self._model) as calls:
            streams = self._model.forward_rows(batch, self.cache)
            drafted = None
            if self._model.mtp is not None:
                drafted = self._model.draft_rows(drafting, streams, self.cache)
        return Passage(calls, streams, drafted)


class Replay:
    """The sparse layers alone, with a format's cache, on the inputs that an unquantised pass gave them.

    So what differs is what the format does in that layer, not what it did before.
    """

    def __init__(
        self, model: Qwen4ExpForCausalLM, length: int, kv_format: str, scales: KVScales | None
    ) -> None:
        self._cache = _new_cache(model, length, kv_format, scales)
        self._layers = dict(zip(sparse_layers(model), _sparse(self._cache), strict=True))

    def advance(self, calls: dict[str, SparseCall]) -> dict[str, SparseCall]:
        """The calls of a chunk again."""
        steps: dict[int, Step] = {}  # all layers of a batch share one
        again = {}
        for name, call in calls.items():
            step = steps.setdefault(
                id(call.step), Step(call.step.batch, call.step.config, self._cache.tables)
            )
            layer = self._layers[name]
            again[name] = SparseCall(call.attention, call.x, step, layer, call.attention(call.x, step, layer))
        return again


def _new_cache(
    model: Qwen4ExpForCausalLM, length: int, kv_format: str | None, scales: KVScales | None
) -> HybridCache:
    """Room for one request, which is opened; index keys have 16 bits in every pass."""
    own = CacheConfig.unquantised(model.dtype, 1, length).kv_format
    cache = model.new_cache(
        CacheConfig(kv_format=kv_format or own, scales=scales, num_draft_tokens=1, max_tokens=length)
    )
    cache.reserve(cache.open(), length)
    return cache


def _sparse(cache: HybridCache) -> list[QSALayerCache]:
    draft = [] if cache.draft is None else [cache.draft.mixer]
    return [layer for layer in [*cache.qsa, *draft] if isinstance(layer, QSALayerCache)]
