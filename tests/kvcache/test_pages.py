"""Block tables: what a request holds, where its tokens lie, and what comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from page4.kernels.errors import InputError
from page4.kvcache.pages import PAGE_TOKENS, BlockTables, RequestPages

CPU = torch.device("cpu")


def test_slots_follow_the_block_table_not_the_position() -> None:
    pages = RequestPages(torch.tensor([[7, 2, 4], [1, 0, -1]]))
    positions = torch.tensor([[0, 15, 16, 31, 32, 40], [3, 4, 5, 6, 16, 17]])
    assert pages.slots(positions).tolist() == [
        [7 * 16, 7 * 16 + 15, 2 * 16, 2 * 16 + 15, 4 * 16, 4 * 16 + 8],
        [16 + 3, 16 + 4, 16 + 5, 16 + 6, 0, 1],
    ]


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (16, 1), (17, 2), (32, 2), (33, 3), (48, 3)])
def test_a_batch_of_tables_is_as_wide_as_its_longest_request_needs(length: int, pages: int) -> None:
    tables = BlockTables(requests=3, pages=8, device=CPU)
    short, long = tables.open(), tables.open()
    tables.reserve(long, 48)
    tables.reserve(short, 5)
    held = tables.of(torch.tensor([long, short]), length).tables
    assert held.tolist() == [tables.pages(long)[:pages], [*tables.pages(short), -1, -1][:pages]]


def test_a_table_grows_with_its_request_and_never_moves() -> None:
    tables = BlockTables(requests=1, pages=8, device=CPU)
    request = tables.open()
    held: list[int] = []
    for length in (1, 16, 17, 40, 40, 3):
        tables.reserve(request, length)
        table = tables.pages(request)
        assert len(table) == max(len(held), -(-length // PAGE_TOKENS))
        assert table[: len(held)] == held
        held = table


def test_a_shared_page_stands_in_both_tables_and_is_freed_with_the_last() -> None:
    tables = BlockTables(requests=2, pages=4, device=CPU)
    first, second = tables.open(), tables.open()
    tables.reserve(first, 40)
    tables.share(second, tables.pages(first)[:2])
    assert tables.missing(second, 40) == 1
    tables.reserve(second, 40)
    assert tables.tensor[second].tolist()[:2] == tables.tensor[first].tolist()[:2]
    tables.check()
    tables.close(first)
    assert tables.pool.free == 1
    tables.close(second)
    tables.check()
    assert tables.pool.free == 4


def test_request_rows_run_out_with_a_message() -> None:
    tables = BlockTables(requests=2, pages=8, device=CPU)
    assert {tables.open(), tables.open()} == {0, 1}
    with pytest.raises(InputError, match="all 2 request rows are in use: raise max_requests"):
        tables.open()


def test_a_closed_request_gives_back_its_row_and_pages() -> None:
    tables = BlockTables(requests=1, pages=4, device=CPU)
    for _ in range(3):
        request = tables.open()
        tables.reserve(request, 64)
        assert tables.pool.free == 0
        tables.close(request)
        assert tables.pool.free == 4
    with pytest.raises(KeyError):
        tables.close(request)


@given(st.lists(st.tuples(st.sampled_from(["open", "grow", "close"]), st.integers(0, 3), st.integers(1, 60))))
def test_accounting_holds_after_any_sequence_of_operations(operations: list[tuple[str, int, int]]) -> None:
    tables = BlockTables(requests=4, pages=10, device=CPU)
    open_requests: list[int] = []
    for operation, which, length in operations:
        try:
            if operation == "open":
                open_requests.append(tables.open())
            elif open_requests:
                request = open_requests[which % len(open_requests)]
                if operation == "grow":
                    tables.reserve(request, length)
                else:
                    tables.close(request)
                    open_requests.remove(request)
        except InputError:
            pass  # out of rows or pages: nothing changed
        tables.check()
        held = [page for r in open_requests for page in tables.pages(r)]
        assert len(held) == len(set(held)) == 10 - tables.pool.free


def test_one_request_may_hold_so_many_pages_and_no_more() -> None:
    tables = BlockTables(requests=2, pages=8, device=CPU, pages_per_request=3)
    request = tables.open()
    address = tables.tensor.data_ptr()
    tables.reserve(request, 48)
    with pytest.raises(InputError, match="49 tokens are more than one request may hold, 48"):
        tables.reserve(request, 49)
    assert len(tables.pages(request)) == 3
    assert tables.tensor.data_ptr() == address, "captured graphs hold on to it"


def test_the_lowest_free_row_is_taken_first() -> None:
    tables = BlockTables(requests=3, pages=8, device=CPU)
    assert [tables.open() for _ in range(3)] == [0, 1, 2]
    for row in (2, 0):
        tables.close(row)
    assert [tables.open(), tables.open()] == [0, 2]


def test_rows_have_the_slots_of_their_requests_and_padding_has_none() -> None:
    tables = BlockTables(requests=2, pages=8, device=CPU)
    first, second = tables.open(), tables.open()
    tables.reserve(second, 1)
    tables.reserve(first, 33)
    requests, positions = torch.tensor([first, -1, second, first]), torch.tensor([32, -1, 3, 17])
    pages = tables.pages(first)
    expected = [16 * pages[2], -1, 16 * tables.pages(second)[0] + 3, 16 * pages[1] + 1]
    assert tables.slots(requests, positions).tolist() == expected
