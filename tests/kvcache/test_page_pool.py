"""Pages: every one is free, held or idle, is given up once by each holder, and none is lost."""

from __future__ import annotations

import pytest

from page4.kernels.errors import InputError
from page4.kvcache.page_pool import PagePool


def kept(pool: PagePool, count: int) -> list[int]:
    """Pages that the index keeps and one request holds."""
    pages = pool.allocate(count)
    for page in pages:
        pool.keep(page)
    return pages


def test_pages_are_distinct_until_all_are_taken() -> None:
    pool = PagePool(5, 16)
    taken = pool.allocate(2) + pool.allocate(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert pool.available == 0


def test_exhaustion_says_what_is_free_what_is_needed_and_what_to_raise() -> None:
    pool = PagePool(5, 16)
    pool.allocate(3)
    with pytest.raises(InputError) as caught:
        pool.allocate(4)
    assert str(caught.value) == (
        "the KV cache has 2 of 5 pages free, 4 more are needed: raise max_tokens (now 80)"
    )
    assert pool.free == 2, "a refused request takes nothing"


def test_released_pages_are_handed_out_again() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(2)
    pool.release(pages)
    assert sorted(pool.allocate(2)) == sorted(pages)


@pytest.mark.parametrize("page", [0, 99])
def test_a_page_that_is_not_owned_cannot_be_freed(page: int) -> None:
    pool = PagePool(4, 16)
    with pytest.raises(RuntimeError, match=f"page {page} is freed but not owned"):
        pool.release([page])


def test_a_double_free_is_found() -> None:
    pool = PagePool(4, 16)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.release([page])
    pool.release([page])
    with pytest.raises(RuntimeError, match="double free"):
        pool.release([page])


@pytest.mark.parametrize("use", ["share", "keep"])
def test_use_after_free_is_found(use: str) -> None:
    pool = PagePool(4, 16)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(RuntimeError, match=f"page {page} is .*: use after free"):
        pool.share([page]) if use == "share" else pool.keep(page)


def test_a_leak_is_found() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(1)
    pool.check([pages])
    with pytest.raises(RuntimeError, match=r"pages leaked: \[0\]"):
        pool.check([])


def test_a_page_in_more_tables_than_hold_it_is_found() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    with pytest.raises(RuntimeError, match=f"page {pages[0]} stands in 2 block tables and is held 1 times"):
        pool.check([pages, pages[:1]])
    pool.share(pages[:1])
    pool.check([pages, pages[:1]])


def test_a_table_with_a_foreign_page_is_found() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    with pytest.raises(RuntimeError, match="page 3 stands in 1 block tables and is held 0 times"):
        pool.check([[*pages, 3]])


def test_a_shared_page_stays_until_its_last_holder_lets_go() -> None:
    pool = PagePool(1, 16)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert (pool.held, pool.free) == (1, 0)
    pool.release(pages)
    assert (pool.held, pool.free) == (0, 1)


def test_kept_pages_become_idle_and_can_be_held_again() -> None:
    pool = PagePool(3, 16)
    pages = kept(pool, 2)
    pool.release(pages)
    assert (pool.free, pool.idle, pool.available) == (1, 2, 3)
    pool.share(pages)
    assert (pool.free, pool.idle, pool.held) == (1, 0, 2)
    pool.check([pages])


def test_free_pages_go_first_and_pages_in_use_never() -> None:
    evicted: list[int] = []
    pool = PagePool(4, 16)
    pool.on_evict = evicted.append
    used, idle = kept(pool, 2), kept(pool, 1)
    pool.release(idle)
    pool.allocate(1)
    assert evicted == []
    assert pool.allocate(1) == idle == evicted
    with pytest.raises(InputError, match="0 of 4 pages free"):
        pool.allocate(1)
    pool.check([used, [page for page in range(4) if page not in used]])


def test_the_least_recently_used_go_first_and_of_a_prefix_its_end() -> None:
    evicted: list[int] = []
    pool = PagePool(6, 16)
    pool.on_evict = evicted.append
    first, second = kept(pool, 3), kept(pool, 3)
    pool.release(second)
    pool.release(first)
    pool.share(second)
    pool.release(second)
    pool.allocate(6)
    assert evicted == [*reversed(first), *reversed(second)]


def test_evicted_pages_are_free_when_they_are_released_the_next_time() -> None:
    pool = PagePool(1, 16)
    pool.release(kept(pool, 1))
    pages = pool.allocate(1)
    pool.release(pages)
    assert (pool.free, pool.idle) == (1, 0)
