"""Prefix reuse: a new prompt goes on from the longest prefix that an earlier one has computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from page4.kernels.errors import InputError

from .cache import HybridCache
from .copy_queue import Ticket
from .file_tier import FileTier
from .host_tier import HostTier
from .pages import PAGE_TOKENS, pages_for
from .prefix_chain import Key, PrefixChain, identity_key
from .prefix_index import PrefixIndex
from .snapshots import SnapshotPool

GIB = 2**30
MOST_GIB = 2**33 - 1
"""So many GiB are a signed 64-bit number of bytes, which is what files and memory have at most."""


@dataclass(frozen=True)
class PrefixConfig:
    """What is kept of prompts, and where.

    Attributes:
        interval: tokens between the snapshots that are kept of a long prompt, a multiple of the prefill
            chunk. A snapshot of the public checkpoint takes 119 MB, as much as the e4m3 K/V of 8,400 tokens:
            at 8192 the two are balanced. A prompt also leaves one at its last whole chunk and one at its end.
        snapshots: held on the device at most, in memory that is taken at once.
        host_gib: budget of the host tier, GiB of pinned memory; 0: none.
        folder: of the file tier; None: none. It needs a host tier, which its groups pass through.
        folder_gib: limit of the folder, GiB; what was used longest ago is removed.
        model: names the weights to the file tier, for example by a digest.

    Raises:
        InputError: a size out of range, or a folder without a host tier or a model.
    """

    interval: int = 8192
    snapshots: int = 8
    host_gib: float = 0.0
    folder: Path | None = None
    folder_gib: float = 16.0
    model: str = ""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise InputError(f"the snapshot interval is {self.interval}, expected at least 1 token")
        if self.snapshots < 0:
            raise InputError(f"snapshots is {self.snapshots}, expected at least 0")
        if not 0 <= self.host_gib <= MOST_GIB:
            raise InputError(f"host_gib is {self.host_gib}, expected 0 to {MOST_GIB} GiB")
        if not 0 < self.folder_gib <= MOST_GIB:
            raise InputError(
                f"folder_gib is {self.folder_gib}, expected more than 0 and at most {MOST_GIB} GiB"
            )
        if self.folder is not None and not (self.host_gib and self.model):
            raise InputError("a file tier needs a host tier (host_gib above 0) and the name of its model")

    def check_chunk(self, chunk: int) -> None:
        """Refuses a prefill chunk that prompts cannot be cut at.

        Raises:
            InputError: it is no multiple of a page, or the interval no multiple of it.
        """
        if chunk % PAGE_TOKENS:
            raise InputError(
                f"prefill_chunk is {chunk}; reuse of prefixes needs a multiple of {PAGE_TOKENS} tokens"
            )
        if self.interval % chunk:
            raise InputError(
                f"the snapshot interval is {self.interval}, expected a multiple of prefill_chunk, {chunk}"
            )


@dataclass
class PrefixStats:
    """What reuse has saved.

    Attributes:
        lookups: prompts.
        hits: prompts of which a prefix was reused.
        prompt_tokens: of all prompts, but for the last token of each, which is never prefilled.
        reused_tokens: of these, not computed again.
        host_hits, file_hits: hits for which a group came back from the host, or from a file before that.
    """

    lookups: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    host_hits: int = 0
    file_hits: int = 0


@dataclass
class Restoration:
    """A prefix on its way back from the host.

    Attributes:
        request: that gets it.
        tickets: of the copies, in order.
        pages: what the pages will contain, to be made known once they do.
        snapshot: what the state will be, if it comes back, too.
    """

    request: int
    tickets: list[Ticket] = field(default_factory=list)
    pages: list[tuple[Key, int]] = field(default_factory=list)
    snapshot: Key | None = None

    def done(self) -> bool:
        """Whether all is back."""
        return all(ticket.done() for ticket in self.tickets)

    def wait(self) -> None:
        """Returns when all is back."""
        for ticket in self.tickets:
            ticket.wait()


@dataclass(frozen=True)
class _Group:
    """Positions ``start`` to ``stop - 1``; ``loaded``: they or the state after them are not on the device."""

    start: int
    stop: int
    loaded: bool


@dataclass(frozen=True)
class _Match:
    length: int
    shared: int  # leading pages that are on the device
    groups: tuple[_Group, ...]


@dataclass(frozen=True)
class _Leaving:
    """A group on its way to a file, by the copy to the host that comes before; and the groups before it."""

    key: Key
    copy: Ticket
    before: list[Key]


class PrefixCache:
    """Pages by content and snapshots of states, on the device and in lower tiers.

    Reuse is exact. What is in a page depends, to the last bit, on how the prompt was cut into chunks, so
    prefixes end where a prompt computed from nothing would be cut, too: after whole chunks, or at the end of
    a prompt of the same length. What decode steps wrote is not reused: they compute in other shapes.

    A *group* is the pages from a multiple of the interval to the next one, or to a snapshot before that.
    Lower tiers hold whole groups with the state after them. Of a prefix in files, its end makes room first.

    Args:
        cache: whose pages and states are kept.
        config: see there.
        chunk: tokens a prefill advances by.
        identity: everything beside tokens that the bytes depend on, by name.
    Raises:
        InputError: the chunk does not fit, the budget is too small, or the folder cannot be used.
    """

    def __init__(
        self,
        cache: HybridCache,
        config: PrefixConfig,
        chunk: int,
        identity: Mapping[str, str],
    ) -> None:
        config.check_chunk(chunk)
        self.config = config
        self.stats = PrefixStats()
        self._cache, self._chunk = cache, chunk
        identity = {"model": config.model, **identity}
        self._root = identity_key(identity)
        self._lookahead = int(cache.draft is not None)
        self.snapshots = SnapshotPool(cache, config.snapshots)
        self.index = PrefixIndex(cache.tables.pool, self.snapshots.drop)
        self.host = self.files = None
        if config.host_gib:
            budget = int(config.host_gib * GIB)
            self.host = HostTier(cache, budget, config.interval // PAGE_TOKENS)
        if config.folder is not None:
            assert self.host is not None
            limit = int(config.folder_gib * GIB)
            self.files = FileTier(config.folder, identity, limit, self.host.group_bytes)
        self._to_files: list[_Leaving] = []

    def chain(self, tokens: Sequence[int]) -> PrefixChain:
        """Keys of a prompt, whose last token is not prefilled."""
        return PrefixChain(self._root, tokens, len(tokens) - 1, self._lookahead)

    def join(self, chain: PrefixChain, request: int) -> tuple[int, Restoration | None]:
        """Gives a request without pages the longest known prefix of its prompt.

        Returns:
            Its length in tokens, and what has to be waited for before the request is computed.
        Raises:
            InputError: too few pages are available; the request has some then, and is to be closed.
        """
        self.poll()
        self.stats.lookups += 1
        self.stats.prompt_tokens += chain.length
        match, from_files = self._available_match(chain)
        if match is None:
            return 0, None
        tables, held = self._cache.tables, [chain.key(g.stop) for g in match.groups if g.loaded]
        known = [self.index.page(key) for key in chain.page_keys(0, match.length)[: match.shared]]
        try:
            self._share(request, match.length, known)
            tables.reserve(request, match.length)
            restoration = self._load(chain, match, request)
        finally:
            for key in held:
                assert self.host is not None
                self.host.release(key)
        if restoration is None or restoration.snapshot is None:
            self.snapshots.load(chain.key(match.length), request)
        self.stats.hits += 1
        self.stats.reused_tokens += match.length
        self.stats.host_hits += restoration is not None
        self.stats.file_hits += from_files
        return match.length, restoration

    def shared_pages(self, chain: PrefixChain) -> int:
        """Pages of a prompt's known prefix that others hold: :meth:`join` takes none for them."""
        match = self._match(chain, set())
        if match is None:
            return 0
        keys = chain.page_keys(0, match.length // PAGE_TOKENS * PAGE_TOKENS)[: match.shared]
        return sum(self._cache.tables.pool.is_held(self.index.page(key)) for key in keys)

    def settle(self, restoration: Restoration) -> None:
        """Makes known what has come back; computation that is launched later waits for it."""
        for ticket in restoration.tickets:
            ticket.before_computation()
        for key, page in restoration.pages:
            self.index.add(key, page)
        if restoration.snapshot is not None:
            self.snapshots.save(restoration.snapshot, restoration.request)

    def keep(self, chain: PrefixChain, length: int, request: int) -> None:
        """Keeps what a request has computed, if a prompt may go on from ``length`` tokens.

        Every prompt is kept at multiples of the interval, at its last whole chunk, and at its end.
        """
        last_chunk = chain.length - chain.length % self._chunk
        if length == 0 or (length % self.config.interval and length not in (last_chunk, chain.length)):
            return
        start = self._group_start(length)
        key, *before = self._group_keys(chain, length)
        keys = chain.page_keys(start, length)
        pages = self._cache.tables.pages(request)[start // PAGE_TOKENS : pages_for(length)]
        for page_key, page in zip(keys, pages, strict=True):
            self.index.add(page_key, page)
        self.snapshots.save(key, request)
        if self.host is not None and key not in self.host:
            ticket = self.host.offload(key, pages, request)
            if ticket is None and self.files is not None:  # all room is on its way to files
                self.flush()
                ticket = self.host.offload(key, pages, request)
            if ticket is not None and self.files is not None and key not in self.files:
                self.host.hold(key)
                self._to_files.append(_Leaving(key, ticket, before))
        self.poll()

    def poll(self) -> None:
        """Moves on what goes on beside the computation; does not wait."""
        if self.host is None:
            return
        self.host.poll()
        if self.files is not None:
            while self._to_files and self._to_files[0].copy.done():
                leaving = self._to_files.pop(0)
                self.files.write(leaving.key, *self.host.content(leaving.key))
                self.files.use(leaving.before)
            for key in self.files.written():
                self.host.release(key)

    def flush(self) -> None:
        """Waits until all that was kept is in the host tier, and in files."""
        if self.host is None:
            return
        self.host.drain()
        self.poll()
        if self.files is not None:
            for key in self.files.written(wait=True):
                self.host.release(key)

    def metrics(self) -> dict[str, Any]:
        """What is kept where, what was reused, and what was moved, of JSON types only.

        Pages by state; snapshots and groups by number; bytes, and bytes per second of the copies that are
        done (None before the first).
        """
        pool = self._cache.tables.pool
        found: dict[str, Any] = {
            "pages": {"total": pool.total, "held": pool.held, "idle": pool.idle, "free": pool.free},
            "snapshots": len(self.snapshots),
            **asdict(self.stats),
        }
        if self.host is not None:
            found["host"] = {"groups": len(self.host), "slots": self.host.slots}
            for name, moved in (("to_host", self.host.out), ("to_device", self.host.back)):
                found["host"][name] = asdict(moved) | {"bytes_per_second": moved.bandwidth}
        if self.files is not None:
            found["files"] = {
                "groups": len(self.files),
                "bytes": self.files.nbytes,
                "bytes_written": self.files.bytes_written,
                "bytes_read": self.files.bytes_read,
                "corrupt": self.files.corrupt,
                "evicted": self.files.evicted,
            }
        return found

    def close(self) -> None:
        """Waits for copies and files, and lets go of the folder."""
        try:
            self.flush()
        finally:
            if self.files is not None:
                self.files.close()

    def _group_start(self, stop: int) -> int:
        return (stop - 1) // self.config.interval * self.config.interval

    def _group_keys(self, chain: PrefixChain, length: int) -> list[Key]:
        """Of the groups of a prefix, its end first."""
        starts = range(self._group_start(length), 0, -self.config.interval)
        return [chain.key(length), *(chain.key(start) for start in starts)]

    def _share(self, request: int, length: int, known: list[int]) -> None:
        """Gives a request the leading pages of a prefix that are on the device.

        Whoever holds the last page of a prefix, when it is part-filled, writes behind the prefix. So if
        another request does, this one gets a copy.
        """
        tables = self._cache.tables
        if length % PAGE_TOKENS and len(known) == pages_for(length) and tables.pool.is_held(known[-1]):
            tables.share(request, known[:-1])
            tables.reserve(request, length)
            self._cache.copy_page(known[-1], tables.pages(request)[-1])
        else:
            tables.share(request, known)

    def _available_match(self, chain: PrefixChain) -> tuple[_Match | None, bool]:
        """The longest match, and whether files were read for it.

        All its groups are on the device or held in the host tier, until they are released there.
        """
        lost: set[Key] = set()
        came = False
        while (match := self._match(chain, lost)) is not None:
            if self.files is not None:
                self.files.use(self._group_keys(chain, match.length))
            held = []
            for group in (group for group in match.groups if group.loaded):
                assert self.host is not None
                key = chain.key(group.stop)
                if key not in self.host:
                    if not self._fetch(key, pages_for(group.stop - group.start)):
                        lost.add(key)
                        break
                    came = True
                self.host.hold(key)
                held.append(key)
            else:
                return match, came
            for key in held:
                self.host.release(key)
        return None, False

    def _fetch(self, key: Key, pages: int) -> bool:
        """Reads a group from its file into the host tier, if it is intact and there is room."""
        assert self.host is not None and self.files is not None
        data = self.files.read(key, pages, self.host.nbytes(pages))
        if data is None:
            return False
        if not self.host.put(key, pages, data):  # what is on its way to files makes room
            self.flush()
            return self.host.put(key, pages, data)
        return True

    def _match(self, chain: PrefixChain, lost: set[Key]) -> _Match | None:
        """The longest prefix with pages and a snapshot in some tier, but for groups that are lost."""
        shared = self.index.leading(chain.page_keys(0, chain.length))
        last_chunk = chain.length - chain.length % self._chunk
        for length in dict.fromkeys((chain.length, *range(last_chunk, 0, -self._chunk))):
            groups = []
            for start in range(0, length, self.config.interval):
                stop = min(start + self.config.interval, length)
                key = chain.key(stop)
                loaded = shared < pages_for(stop) or (stop == length and key not in self.snapshots)
                if loaded and (key in lost or not self._in_lower_tier(key)):
                    break
                groups.append(_Group(start, stop, loaded))
            else:
                if groups:
                    return _Match(length, min(shared, pages_for(length)), tuple(groups))
        return None

    def _in_lower_tier(self, key: Key) -> bool:
        return any(tier is not None and key in tier for tier in (self.host, self.files))

    def _load(self, chain: PrefixChain, match: _Match, request: int) -> Restoration | None:
        """Begins to bring back the groups of a match that are not on the device."""
        restoration = Restoration(request)
        pages = self._cache.tables.pages(request)
        for group in match.groups:
            if not group.loaded:
                continue
            assert self.host is not None
            key, first = chain.key(group.stop), group.start // PAGE_TOKENS
            start = max(first, match.shared)
            missing = pages[start : pages_for(group.stop)]
            if group.stop == match.length and key not in self.snapshots:
                restoration.snapshot = key
            target = request if restoration.snapshot is not None else None
            restoration.tickets.append(self.host.load(key, start - first, missing, target))
            keys = chain.page_keys(group.start, group.stop)[start - first :]
            restoration.pages += zip(keys, missing, strict=True)
        return restoration if restoration.tickets else None
