"""Prefix reuse: a prompt goes on from the longest prefix that is known to the last bit, and from no other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from page4.kernels.errors import InputError
from page4.kvcache import HybridCache, host_tier
from page4.kvcache.group_layout import GroupLayout
from page4.kvcache.prefix_cache import GIB, PrefixCache, PrefixConfig, Restoration
from page4.kvcache.prefix_chain import PrefixChain
from tests.kvcache.stamps import DelayedQueue, check, delayed, small_cache, write

__all__ = ["delayed"]

CHUNK, INTERVAL = 16, 32


def config(cache: HybridCache, host_groups: int = 0, snapshots: int = 8) -> PrefixConfig:
    """A small one: two chunks and two pages an interval, so many groups in the host tier."""
    host = host_groups * GroupLayout(cache, INTERVAL // 16).nbytes / GIB
    return PrefixConfig(interval=INTERVAL, snapshots=snapshots, host_gib=host)


def prefix_cache(cache: HybridCache, host_groups: int = 0, snapshots: int = 8) -> PrefixCache:
    return PrefixCache(cache, config(cache, host_groups, snapshots), CHUNK, {})


@dataclass
class Prompt:
    """A request as a decoder would run it: joined, prefilled in chunks, then decoding."""

    prefix: PrefixCache
    cache: HybridCache
    tokens: list[int]
    row: int = -1
    computed: int = 0
    reused: int = 0
    restoration: Restoration | None = None
    generated: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Where prefilling ends."""
        return len(self.tokens) - 1

    @property
    def chain(self) -> PrefixChain:
        return self.prefix.chain(self.tokens)

    def join(self) -> None:
        self.row = self.cache.open()
        try:
            self.computed, self.restoration = self.prefix.join(self.chain, self.row)
            self.reused = self.computed
            self.cache.reserve(self.row, len(self.tokens))
        except InputError:
            self.leave()
            raise

    def settle(self) -> None:
        if self.restoration is not None:
            self.prefix.settle(self.restoration)
            self.restoration = None

    def chunk(self) -> None:
        """One chunk on the grid of a prompt computed from nothing."""
        self.settle()
        stop = min(self.computed + CHUNK, self.last)
        write(self.cache, self.row, self.tokens, self.computed, stop)
        self.computed = stop
        self.prefix.keep(self.chain, stop, self.row)

    def decode(self, token: int) -> None:
        """Rows behind the prompt, which nobody else may see."""
        self.settle()
        self.cache.reserve(self.row, len(self.tokens) + len(self.generated) + 1)
        self.generated.append(token)
        text = self.tokens + self.generated
        write(self.cache, self.row, text, self.last, len(text) - 1)

    def check(self) -> None:
        if self.restoration is None:
            check(self.cache, self.row, self.tokens, self.computed, state=not self.generated)

    def leave(self) -> None:
        self.settle()
        self.cache.close(self.row)

    def run(self) -> int:
        """From beginning to end; the tokens that were reused."""
        self.join()
        self.settle()
        self.check()
        while self.computed < self.last:
            self.chunk()
        self.check()
        self.leave()
        self.cache.tables.check()
        return self.reused


def serve(prefix: PrefixCache, cache: HybridCache, tokens: Sequence[int]) -> int:
    return Prompt(prefix, cache, list(tokens)).run()


TEXT = list(range(100, 200))


def test_a_repeated_prompt_is_reused_whole_and_others_up_to_where_they_would_be_cut() -> None:
    """The end of a prompt is a place to go on from for a prompt of the same length only."""
    cache = small_cache()
    prefix = prefix_cache(cache)
    assert serve(prefix, cache, TEXT[:90]) == 0
    assert serve(prefix, cache, TEXT[:90]) == 89
    assert serve(prefix, cache, [*TEXT[:89], 7]) == 80, "the draft's last row knows the token after it"
    assert serve(prefix, cache, TEXT[:91]) == 80, "the last whole chunk of the prompt before"
    assert serve(prefix, cache, [*TEXT[:70], *[7] * 20]) == 64, "a multiple of the interval"
    assert serve(prefix, cache, [*TEXT[:64], *[7] * 20]) == 32
    assert serve(prefix, cache, [7, *TEXT[1:90]]) == 0, "every token counts"
    stats = prefix.stats
    assert (stats.lookups, stats.hits, stats.reused_tokens) == (7, 5, 89 + 80 + 80 + 64 + 32)


def test_a_prompt_of_one_token_has_nothing_to_reuse() -> None:
    cache = small_cache()
    prefix = prefix_cache(cache)
    assert [serve(prefix, cache, [5]), serve(prefix, cache, [5])] == [0, 0]


def test_shared_pages_are_held_once_and_survive_whoever_computed_them() -> None:
    cache = small_cache()
    prefix = prefix_cache(cache)
    first, second = Prompt(prefix, cache, TEXT[:65]), Prompt(prefix, cache, [*TEXT[:64], 9, 9])
    first.join()
    for _ in range(4):
        first.chunk()
    second.join()
    assert second.reused == 32, "what follows the 64th token differs"
    assert cache.tables.pages(first.row)[:2] == cache.tables.pages(second.row)[:2]
    first.leave()
    while second.computed < second.last:
        second.chunk()
    second.check()
    cache.tables.check()


def test_a_part_filled_page_is_copied_while_its_first_owner_writes_behind_the_prompt() -> None:
    cache = small_cache()
    prefix = prefix_cache(cache)
    first, second, third = (Prompt(prefix, cache, TEXT[:41]) for _ in range(3))
    first.join()
    while first.computed < first.last:
        first.chunk()
    first.decode(3)
    second.join()
    assert second.reused == 40
    assert cache.tables.pages(first.row)[:2] == cache.tables.pages(second.row)[:2]
    assert cache.tables.pages(first.row)[2] != cache.tables.pages(second.row)[2]
    second.decode(4)
    first.decode(5)
    for request in (first, second):
        check(
            cache, request.row, request.tokens + request.generated, 40 + len(request.generated), state=False
        )
    first.leave()
    third.join()
    third.check()
    assert cache.tables.pool.held == 4, "two pages for both, and one each"


def test_without_a_snapshot_pages_alone_are_of_no_use() -> None:
    cache = small_cache()
    prefix = prefix_cache(cache, snapshots=1)
    serve(prefix, cache, TEXT[:90])
    assert serve(prefix, cache, TEXT[:80] + [7] * 5) == 0
    assert len(prefix.snapshots) == 1


def test_evicted_pages_take_their_snapshots_along() -> None:
    cache = small_cache(max_requests=1, max_tokens=16 * 5)  # 6 pages
    prefix = prefix_cache(cache)
    serve(prefix, cache, TEXT[:65])
    other = Prompt(prefix, cache, [7] * 49)
    other.join()
    assert serve_after(other) == 0
    assert serve(prefix, cache, TEXT[:65]) == 32, "the end of a prefix goes first"


def serve_after(request: Prompt) -> int:
    while request.computed < request.last:
        request.chunk()
    request.leave()
    return request.reused


def test_pages_in_use_are_never_evicted() -> None:
    cache = small_cache(max_requests=2, max_tokens=64)  # 6 pages
    prefix = prefix_cache(cache)
    first, second = Prompt(prefix, cache, TEXT[:60]), Prompt(prefix, cache, [7] * 60)
    first.join()
    while first.computed < first.last:
        first.chunk()
    with pytest.raises(InputError, match="2 of 6 pages free, 4 more are needed"):
        second.join()
    first.check()
    first.leave()
    assert second.run() == 0


def test_groups_come_back_from_the_host_after_the_device_has_lost_them(delayed: DelayedQueue) -> None:
    cache = small_cache(max_requests=1, max_tokens=128)
    prefix = prefix_cache(cache, host_groups=8)
    serve(prefix, cache, TEXT[:90])
    evict(cache)
    assert len(prefix.index) == len(prefix.snapshots) == 0
    again = Prompt(prefix, cache, TEXT[:90])
    again.join()
    assert again.reused == 89
    assert again.restoration is not None and not again.restoration.done()
    again.restoration.wait()
    again.check()
    again.settle()
    again.check()
    again.leave()
    assert serve(prefix, cache, TEXT[:90]) == 89
    assert prefix.stats.host_hits == 1, "the second time all was on the device"


def evict(cache: HybridCache) -> None:
    """Somebody takes all pages that nobody holds, writes there, and leaves."""
    pool = cache.tables.pool
    pages = pool.allocate(pool.available)
    for stored in cache.paged_tensors():
        stored[pages] = 99
    pool.release(pages)


def test_a_snapshot_stays_of_use_where_others_took_the_pages_before_it() -> None:
    """Two compute the same beginning at once; the one whose pages are known leaves first."""
    cache = small_cache(max_requests=2, max_tokens=128)
    prefix = prefix_cache(cache, host_groups=8)
    first, second = Prompt(prefix, cache, TEXT[:65]), Prompt(prefix, cache, TEXT[:65])
    first.join()
    second.join()
    for request in (first, first, second, second, second, second):
        request.chunk()
    first.leave()
    second.leave()
    pool = cache.tables.pool
    taken = pool.allocate(pool.free + 2)
    assert second.chain.key(32) not in prefix.index and second.chain.key(64) in prefix.snapshots
    pool.release(taken)
    assert serve(prefix, cache, TEXT[:65]) == 64
    assert prefix.stats.host_hits == 1


def test_a_host_tier_that_is_full_forgets_what_was_used_longest_ago() -> None:
    cache = small_cache(max_requests=1, max_tokens=128)
    prefix = prefix_cache(cache, host_groups=2)
    serve(prefix, cache, TEXT[:33])
    serve(prefix, cache, [7] * 33)
    evict(cache)
    assert serve(prefix, cache, TEXT[:33]) == 32
    serve(prefix, cache, [8] * 33)
    evict(cache)
    assert serve(prefix, cache, TEXT[:33]) == 32
    assert serve(prefix, cache, [7] * 33) == 0


def test_groups_wait_for_room_on_their_way_to_files(tmp_path: Path) -> None:
    """A host tier of one group, and three that are kept at once: none is left out."""
    cache = small_cache()
    host = GroupLayout(cache, INTERVAL // 16).nbytes / GIB
    options = PrefixConfig(INTERVAL, snapshots=0, host_gib=host, folder=tmp_path, model="m")
    prefix = PrefixCache(cache, options, CHUNK, {})
    serve(prefix, cache, TEXT[:90])
    prefix.flush()
    assert prefix.files is not None and prefix.host is not None
    assert (len(prefix.files), len(prefix.host)) == (4, 1), "two intervals, the last chunk, and the end"
    prefix.close()
    empty = small_cache()
    restarted = PrefixCache(empty, options, CHUNK, {})
    assert serve(restarted, empty, TEXT[:90]) == 32, "as much as there is room for at once"
    restarted.close()


def filed(folder: Path, groups: float) -> tuple[PrefixCache, HybridCache]:
    """A cache with an empty device and host, and a folder that has room for so many groups."""
    cache = small_cache(max_requests=1, max_tokens=256)
    group = GroupLayout(cache, INTERVAL // 16).nbytes
    host, limit = 16 * group / GIB, groups * (group + 512) / GIB
    options = PrefixConfig(INTERVAL, 8, host, folder, limit, model="m")
    return PrefixCache(cache, options, CHUNK, {}), cache


def test_of_a_prefix_in_files_the_end_makes_room_first(tmp_path: Path) -> None:
    """Without its beginning, no part of it is of use."""
    prefix, cache = filed(tmp_path, groups=3)
    serve(prefix, cache, TEXT[:97])
    prefix.flush()
    serve(prefix, cache, [7] * 33)
    prefix.close()
    files = prefix.metrics()["files"]
    assert (files["evicted"], files["groups"]) == (1, 3)
    assert files["bytes"] <= prefix.config.folder_gib * GIB
    again, cache = filed(tmp_path, groups=3)
    assert serve(again, cache, TEXT[:97]) == 64, "two intervals of three"
    again.close()


def test_what_is_reused_on_the_device_keeps_its_file(tmp_path: Path) -> None:
    """So a server that is restarted finds what it used most, not what it read most."""
    prefix, cache = filed(tmp_path, groups=2)
    for tokens in (TEXT[:33], [7] * 33, TEXT[:33], [8] * 33):
        serve(prefix, cache, tokens)
        prefix.flush()
    assert prefix.stats.hits == 1 and prefix.stats.host_hits == 0
    prefix.close()
    again, cache = filed(tmp_path, groups=2)
    assert [serve(again, cache, tokens) for tokens in (TEXT[:33], [7] * 33)] == [32, 0]
    again.close()


@pytest.mark.parametrize(
    ("options", "chunk", "message"),
    [
        ({"interval": 0}, 16, "the snapshot interval is 0, expected at least 1 token"),
        ({"interval": 40}, 16, "interval is 40, expected a multiple of prefill_chunk, 16"),
        ({"interval": 40}, 20, "prefill_chunk is 20; reuse of prefixes needs a multiple of 16 tokens"),
        ({"snapshots": -1}, 16, "snapshots is -1, expected at least 0"),
        ({"host_gib": -1.0}, 16, "host_gib is -1.0, expected 0 to 8589934591 GiB"),
        ({"host_gib": float("nan")}, 16, "host_gib is nan, expected 0 to 8589934591 GiB"),
        ({"host_gib": 8e9}, 16, "host tier cannot have .* GiB of memory: lower host_gib"),
        ({"host_gib": 1e7}, 16, "host tier cannot have .* GiB of memory: lower host_gib"),
        ({"host_gib": 1e308}, 16, "host_gib is 1e.308, expected 0 to 8589934591 GiB"),
        ({"host_gib": 1e-9}, 16, "one group of 512 pages and a state takes .*: raise host_gib or lower"),
        ({"folder_gib": 0.0}, 16, "folder_gib is 0.0, expected more than 0 and at most"),
        ({"folder_gib": -1.0}, 16, "folder_gib is -1.0, expected more than 0 and at most"),
        ({"folder_gib": float("nan")}, 16, "folder_gib is nan, expected more than 0 and at most"),
        ({"folder_gib": 1e308}, 16, "folder_gib is 1e.308, expected .* at most 8589934591 GiB"),
        (
            {"folder": Path("x"), "model": "m", "interval": 32, "host_gib": 1e-3, "folder_gib": 1e-9},
            16,
            "the file tier has 9.31e-10 GiB, one group takes .*: raise folder_gib or lower the snapshot",
        ),
        ({"folder": "x", "model": "m"}, 16, "a file tier needs a host tier"),
        ({"folder": "x", "host_gib": 1.0}, 16, "a file tier needs .* the name of its model"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, object], chunk: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrefixCache(small_cache(), PrefixConfig(**options), chunk, {})  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90), st.integers(0, 1)), max_size=12))
@settings(max_examples=60)
def test_where_nothing_is_evicted_the_longest_kept_prefix_is_found(cases: list[tuple[int, int, int]]) -> None:
    """Against a list of all places that prompts were kept at."""
    cache = small_cache(max_requests=1, max_tokens=12 * 96)
    prefix = prefix_cache(cache, snapshots=100)
    kept: set[tuple[int, ...]] = set()
    for family, length, suffix in cases:
        tokens = [*range(100 * family, 100 * family + length), suffix]
        end, whole = length, length // CHUNK * CHUNK
        ends = {end, *range(CHUNK, whole + 1, CHUNK)}
        expected = max((n for n in ends if tuple(tokens[: n + 1]) in kept), default=0)
        assert serve(prefix, cache, tokens) == expected
        kept |= {tuple(tokens[: n + 1]) for n in {end, whole, *range(INTERVAL, end + 1, INTERVAL)} if n}


class Requests(RuleBasedStateMachine):
    """Requests of three families of prompts, in a pool, snapshots and a host tier that are all too small."""

    steps: ClassVar[int] = 0
    hits: ClassVar[dict[str, int]] = {"device": 0, "host": 0}

    def __init__(self) -> None:
        super().__init__()
        self.queue = DelayedQueue()
        patch = pytest.MonkeyPatch()
        patch.setattr(host_tier, "copy_queue", lambda device: self.queue)
        self.cache = small_cache(max_requests=4, max_tokens=14 * 16)
        self.prefix = prefix_cache(self.cache, host_groups=5, snapshots=3)
        patch.undo()
        self.open: list[Prompt] = []
        self.kept: set[tuple[int, ...]] = set()

    def start(self, tokens: list[int]) -> None:
        request = Prompt(self.prefix, self.cache, tokens)
        try:
            request.join()
        except InputError:
            return  # no row or no pages: nothing has changed
        assert request.reused == 0 or tuple(tokens[: request.reused + 1]) in self.kept
        self.open.append(request)

    @rule(family=st.integers(0, 2), length=st.sampled_from([1, 16, 32, 39, 65, 70]), suffix=st.integers(0, 2))
    def join(self, family: int, length: int, suffix: int) -> None:
        if len(self.open) < 4:
            self.start([*range(100 * family, 100 * family + length), 7 + suffix])

    @precondition(lambda self: 0 < len(self.open) < 4)
    @rule(which=st.integers(0, 3), cut=st.integers(1, 70), suffix=st.lists(st.integers(0, 9), max_size=20))
    def fork(self, which: int, cut: int, suffix: list[int]) -> None:
        tokens = self.open[which % len(self.open)].tokens
        self.start(tokens[:cut] + suffix)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3), steps=st.integers(1, 5), token=st.integers(0, 9))
    def advance(self, which: int, steps: int, token: int) -> None:
        request = self.open[which % len(self.open)]
        for _ in range(steps):
            if request.computed < request.last:
                request.chunk()
                self.kept.add(tuple(request.tokens[: request.computed + 1]))
            else:
                with contextlib.suppress(InputError):
                    request.decode(token)

    @rule(family=st.integers(0, 2), length=st.sampled_from([33, 65, 70]))
    def come_and_go(self, family: int, length: int) -> None:
        before = len(self.open)
        self.join(family, length, suffix=0)
        if len(self.open) > before:
            self.advance(before, steps=5, token=0)
            self.leave(before)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        self.open.pop(which % len(self.open)).leave()

    @rule(pages=st.integers(1, 18))
    def evict(self, pages: int) -> None:
        pool = self.cache.tables.pool
        taken = pool.allocate(min(pages, pool.available))
        for stored in self.cache.paged_tensors():
            stored[taken] = 99
        pool.release(taken)

    @rule(copies=st.integers(1, 3))
    def copies_arrive(self, copies: int) -> None:
        self.queue.advance(min(self.queue.made + copies, self.queue.made + len(self.queue.waiting)))

    @invariant()
    def everybody_has_their_own_text_and_no_page_is_lost(self) -> None:
        Requests.steps += 1
        for request in self.open:
            request.check()
        self.cache.tables.check()

    def teardown(self) -> None:
        Requests.hits["device"] += self.prefix.stats.hits - self.prefix.stats.host_hits
        Requests.hits["host"] += self.prefix.stats.host_hits
        for request in self.open:
            request.leave()
        self.cache.tables.check()
        assert self.cache.tables.pool.held == 0


def test_ten_thousand_random_steps_against_what_each_request_computed() -> None:
    run_state_machine_as_test(Requests, settings=settings(max_examples=60, stateful_step_count=200))
    assert Requests.steps >= 10_000
    assert min(Requests.hits.values()) > 100, "steps that reuse nothing prove nothing"
