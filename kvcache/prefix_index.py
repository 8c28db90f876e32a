"""Which pages on the device hold which prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .page_pool import PagePool
from .prefix_chain import Key


class PrefixIndex:
    """Pages by the key of the prefix that ends in them.

    Args:
        pool: of the pages; pages in the index become idle instead of free, and are forgotten when evicted.
        on_forget: called with the key of an evicted page.
    """

    def __init__(self, pool: PagePool, on_forget: Callable[[Key], None]) -> None:
        self._pool = pool
        self._pages: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._on_forget = on_forget
        pool.on_evict = self._evicted

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def page(self, key: Key) -> int:
        """The page of a key."""
        return self._pages[key]

    def add(self, key: Key, page: int) -> None:
        """Remembers what a held page contains, unless another page contains the same."""
        if key not in self._pages and page not in self._keys:
            self._pool.keep(page)
            self._pages[key], self._keys[page] = page, key

    def leading(self, keys: Sequence[Key]) -> int:
        """How many of the keys, from the first on, are known."""
        return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def _evicted(self, page: int) -> None:
        key = self._keys.pop(page)
        del self._pages[key]
        self._on_forget(key)
