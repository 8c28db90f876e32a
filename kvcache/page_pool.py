"""Which pages are free, held by requests, or kept for prompts to come."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from page4.kernels.errors import InputError


class PagePool:
    """Hands out page ids. Pages are counted references: several requests may hold one.

    A page is *free*, *held* (by at least one request), or *idle*: held by none, but kept because the prefix
    index knows what it contains. Idle pages are given away when no free ones are left, the one released
    longest ago first. A page id means the same tokens in every layer: all layers share the block tables.

    Args:
        pages: number of them.
        page_tokens: tokens of a page, for messages.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.total = pages
        self._page_tokens = page_tokens
        self._free = list(range(pages - 1, -1, -1))
        self._holders: dict[int, int] = {}
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.on_evict: Callable[[int], None] = lambda page: None
        """Called with an idle page just before it is given away; the index forgets it then."""

    @property
    def free(self) -> int:
        """Pages that nobody holds and the index does not keep."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and the index keeps."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """Pages that requests hold."""
        return len(self._holders)

    @property
    def available(self) -> int:
        """Pages that :meth:`allocate` can give."""
        return len(self._free) + len(self._idle)

    def is_held(self, page: int) -> bool:
        """Whether a request holds the page."""
        return page in self._holders

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` pages for one holder.

        Raises:
            InputError: fewer are available; none is taken or evicted then.
        """
        if count > self.available:
            raise InputError(
                f"the KV cache has {self.available} of {self.total} pages free, {count} more are needed: "
                f"raise max_tokens (now {self.total * self._page_tokens})"
            )
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            self.on_evict(page)
            self._kept.remove(page)
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for pages that are held or idle; taking others is an error of the program."""
        for page in pages:
            if page not in self._holders and page not in self._idle:
                raise RuntimeError(f"page {page} is shared but neither held nor kept: use after free")
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each; releasing a page that nobody holds is an error of the program.

        A request's last pages become idle first: a page of a prefix is of use only with those before it, so
        these are evicted later.
        """
        for page in reversed(pages):
            holders = self._holders.get(page, 0)
            if not holders:
                raise RuntimeError(f"page {page} is freed but not owned: double free or foreign page")
            if holders > 1:
                self._holders[page] = holders - 1
                continue
            del self._holders[page]
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """The index knows the content of a page that is held: it becomes idle, not free, when released."""
        if page not in self._holders:
            raise RuntimeError(f"page {page} is kept but not held: use after free")
        self._kept.add(page)

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Accounting: every page is free, idle, or held by as many tables as it is counted for.

        Raises:
            RuntimeError: a page leaked, stands in a table more often than it is held, or is in two states.
        """
        found = Counter(page for table in tables for page in table)
        for page, count in found.items():
            holders = self._holders.get(page, 0)
            if count > holders:
                raise RuntimeError(f"page {page} stands in {count} block tables and is held {holders} times")
        lost = sorted(page for page, holders in self._holders.items() if found[page] < holders)
        if lost:
            raise RuntimeError(f"pages leaked: {lost} are held and stand in too few block tables")
        states = Counter([*self._free, *self._idle, *self._holders])
        if len(states) != self.total or max(states.values()) > 1:
            raise RuntimeError(f"{len(states)} of {self.total} pages have a state, or one has two")
        if not set(self._idle) <= self._kept <= set(self._idle) | set(self._holders):
            raise RuntimeError("a free page is kept, or an idle one is not")
