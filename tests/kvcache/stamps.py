"""A cache without a model: what a page or state holds is a number that names the tokens it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from page4.kvcache import CacheConfig, CacheGeometry, HybridCache, KVScales, ScalePair, host_tier
from page4.kvcache.copy_queue import Ticket
from page4.kvcache.pages import PAGE_TOKENS

GEOMETRY = CacheGeometry(
    layer_types=("linear_attention", "qsa_attention"),
    ple_layers=(0,),
    kv_heads=1,
    head_dim=4,
    index_dim=2,
    compress_ratio=4,
    delta_heads=1,
    delta_key_dim=2,
    delta_value_dim=2,
    conv_channels=2,
    conv_length=3,
    ple_channels=2,
    ple_length=3,
    has_draft=True,
)


def small_cache(max_requests: int = 3, max_tokens: int = 256, kv_format: str = "e4m3") -> HybridCache:
    """One delta layer with PLE, one sparse layer, and the draft's."""
    scales = KVScales((ScalePair(1, 1),), ScalePair(1, 1)) if kv_format == "e4m3" else None
    config = CacheConfig(kv_format, scales=scales, max_requests=max_requests, max_tokens=max_tokens)
    return HybridCache(GEOMETRY, config, torch.float16, torch.device("cpu"))


def stamps(tokens: Sequence[int]) -> list[int]:
    """A number for every prefix of the tokens, the empty one first."""
    numbers = [1]
    for token in tokens:
        numbers.append((numbers[-1] * 1_000_003 + token + 1) % 2**31)
    return numbers


def write(cache: HybridCache, request: int, tokens: Sequence[int], start: int, stop: int) -> None:
    """Computes positions ``start`` to ``stop - 1``, as a prefill would: pages, then the state after them."""
    for (target, rows), values in zip(
        _rows(cache, request, start, stop), _values(tokens, start, stop), strict=True
    ):
        target[rows] = (
            values.to(target.dtype).view(len(values), *[1] * (target.ndim - 2)).expand_as(target[rows])
        )
    for state, value in zip(cache.prefilled_state(request), _state_values(tokens, stop), strict=False):
        state.fill_(value)


def check(cache: HybridCache, request: int, tokens: Sequence[int], length: int, state: bool = True) -> None:
    """The request holds what was computed from its own tokens, and from nothing else."""
    for (target, rows), values in zip(
        _rows(cache, request, 0, length), _values(tokens, 0, length), strict=True
    ):
        found = target[rows].flatten(1)
        expected = values.to(target.dtype)[:, None].expand_as(found)
        assert torch.equal(found, expected), "a page holds something else"
    if state and length:
        for part, value in zip(cache.prefilled_state(request), _state_values(tokens, length), strict=False):
            assert torch.equal(part, torch.full_like(part, value)), "a state is that of another prefix"


def _rows(cache: HybridCache, request: int, start: int, stop: int) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """Views ``[pages, 16 or 4, ...]`` of target, draft and compressed keys, and their rows of positions."""
    assert cache.draft is not None
    pages = torch.tensor(cache.tables.pages(request), dtype=torch.int64)
    positions = torch.arange(start, stop)
    blocks = torch.arange(start // 4, stop // 4)
    found = []
    for layer in (cache.qsa[0], cache.draft.mixer):
        index = (pages[positions // PAGE_TOKENS], positions % PAGE_TOKENS)
        found.append((layer.k_pages.transpose(1, 2), index))  # type: ignore[union-attr]
        found.append((layer.compressed_pages, (pages[blocks // 4], blocks % 4)))  # type: ignore[union-attr]
    return found


def _values(tokens: Sequence[int], start: int, stop: int) -> list[Tensor]:
    """What the rows of :func:`_rows` hold: the draft's, and no other, depends on the token after them."""
    known = stamps(tokens)
    target, draft = (
        torch.tensor([known[min(p + ahead, len(tokens))] % 251 for p in range(start, stop)])
        for ahead in (1, 2)
    )
    keys, draft_keys = (
        torch.tensor([known[min(4 * b + 4 + ahead, len(tokens))] % 251 for b in range(start // 4, stop // 4)])
        for ahead in (0, 1)
    )
    return [target, keys, draft, draft_keys]


def _state_values(tokens: Sequence[int], length: int) -> list[float]:
    number = stamps(tokens)[length]
    return [float((number >> i) % 2039) for i in range(8)]


class DelayedQueue:
    """Copies that are made as late as their tickets allow: a forgotten wait finds old bytes."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.made = 0

    def submit(self, copy: Callable[[], object]) -> Ticket:
        """See :class:`page4.kvcache.copy_queue.CopyQueue`."""
        self.waiting.append(copy)
        return _Delayed(self, self.made + len(self.waiting))

    def advance(self, upto: int) -> None:
        """Makes copies in order, up to the one with this number."""
        while self.made < upto:
            self.waiting.pop(0)()
            self.made += 1


class _Delayed:
    def __init__(self, queue: DelayedQueue, number: int) -> None:
        self._queue, self._number = queue, number

    def done(self) -> bool:
        return self._queue.made >= self._number

    def before_computation(self) -> None:
        self._queue.advance(self._number)

    def wait(self) -> None:
        self._queue.advance(self._number)

    def seconds(self) -> float:
        return 1.0


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> DelayedQueue:
    """The queue of every host tier that the test makes."""
    queue = DelayedQueue()
    monkeypatch.setattr(host_tier, "copy_queue", lambda device: queue)
    return queue
