"""Packing the segments of a step."""

from __future__ import annotations

import pytest
import torch

from page4.model import RowBatch, Segment

CPU = torch.device("cpu")


def segment(request: int, position: int, tokens: list[int], decode: bool, slot: int = 0) -> Segment:
    return Segment(request, position, torch.tensor(tokens), (90 + request, 91 + request), decode, slot)


def test_rows_keep_their_tokens_positions_and_history() -> None:
    batch = RowBatch.pack([segment(0, 5, [1, 2, 3], False), segment(1, 9, [4], True)], CPU)
    rows = batch.rows(0)
    assert batch.token_ids[rows].tolist() == [1, 2, 3]
    assert batch.positions[rows].tolist() == [5, 6, 7]
    assert batch.token_history[rows].tolist() == [[90, 91, 1], [91, 1, 2], [1, 2, 3]]
    assert batch.token_history[batch.rows(1)].tolist() == [[91, 92, 4]]


def test_segments_of_one_phase_and_length_form_one_group() -> None:
    segments = [
        segment(0, 8, [1, 2], True, slot=1),
        segment(1, 0, [3, 4], False),
        segment(2, 3, [5, 6], True, slot=2),
        segment(3, 3, [7], True),
    ]
    batch = RowBatch.pack(segments, CPU)
    groups = {(g.decode, g.length): (g.requests.tolist(), g.read_slots.tolist()) for g in batch.groups}
    assert groups == {(True, 2): ([0, 2], [1, 2]), (False, 2): ([1], [0]), (True, 1): ([3], [0])}


def test_a_group_reads_and_writes_its_own_rows() -> None:
    batch = RowBatch.pack(
        [segment(0, 0, [1, 2], True), segment(1, 0, [3, 4], True), segment(2, 0, [5], True)], CPU
    )
    x = torch.zeros(5, 1)
    for group in batch.groups:
        group.put_rows(x, batch_tokens(batch, group.start, group.stop).view(-1, group.length, 1))
    assert x.squeeze(1).tolist() == batch.token_ids.tolist()


def batch_tokens(batch: RowBatch, start: int, stop: int) -> torch.Tensor:
    return batch.token_ids[start:stop].float()


def test_rows_of_an_absent_request() -> None:
    with pytest.raises(KeyError):
        RowBatch.pack([segment(0, 0, [1], True)], CPU).rows(1)


def test_rows_of_device_tensors_are_those_that_the_host_packs() -> None:
    tokens = [[1, 2, 3], [4, 5, 6]]
    packed = RowBatch.pack(
        [segment(0, 5, tokens[0], True, slot=1), segment(1, 9, tokens[1], True, slot=2)], CPU
    )
    made = RowBatch.of_decode_rows(
        requests=torch.tensor([0, 1]),
        first=torch.tensor([5, 9]),
        history=torch.tensor([[90, 91, *tokens[0]], [91, 92, *tokens[1]]]),
        read_slots=torch.tensor([1, 2]),
        rows=3,
        longest=12,
    )
    for name in ("token_ids", "positions", "token_history"):
        assert torch.equal(getattr(made, name), getattr(packed, name))
    (ours,), (theirs,) = made.groups, packed.groups
    assert (ours.start, ours.length, ours.decode, ours.longest) == (0, 3, True, 12)
    assert theirs.longest == 12
    assert ours.requests.tolist() == theirs.requests.tolist() and ours.read_slots.tolist() == [1, 2]
    assert made.decode


def test_a_padded_request_has_no_positions() -> None:
    batch = RowBatch.of_decode_rows(
        torch.tensor([-1, 3]), torch.tensor([7, 7]), torch.ones(2, 4, dtype=torch.int64), torch.zeros(2), 2, 9
    )
    assert batch.positions.tolist() == [-1, -1, 7, 8]
