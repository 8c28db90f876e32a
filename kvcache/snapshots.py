"""Snapshots: what a prefix needs beside its pages to be gone on with."""

from __future__ import annotations

from collections import OrderedDict

from .cache import HybridCache
from .prefix_chain import Key


class SnapshotPool:
    """Recurrent states and rings after prefixes, in device memory.

    A snapshot is what a prefill leaves behind for a request: one state matrix a head and delta layer, the
    inputs of its convolutions and of PLE's, and the raw index keys of each sparse layer. The one used longest
    ago makes room.

    Args:
        cache: whose requests are copied.
        slots: snapshots held at most.
    """

    def __init__(self, cache: HybridCache, slots: int) -> None:
        self._cache = cache
        self._slots: OrderedDict[Key, int] = OrderedDict()
        self._free = list(range(slots))
        self._stored = [part.new_zeros(slots, *part.shape) for part in cache.prefilled_state(0)]

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def save(self, key: Key, request: int) -> None:
        """Copies a request's state, unless the key is known."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        if not self._free:
            if not self._slots:
                return  # a pool of no snapshots
            self._free.append(self._slots.popitem(last=False)[1])
        slot = self._slots[key] = self._free.pop()
        for stored, part in zip(self._stored, self._cache.prefilled_state(request), strict=True):
            stored[slot].copy_(part)

    def load(self, key: Key, request: int) -> None:
        """Copies a snapshot into a request's state."""
        self._slots.move_to_end(key)
        slot = self._slots[key]
        for stored, part in zip(self._stored, self._cache.prefilled_state(request), strict=True):
            part.copy_(stored[slot])

    def drop(self, key: Key) -> None:
        """Forgets a snapshot, if there is one."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)
