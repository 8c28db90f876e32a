"""Cache writes: padded slots, page layout, and index keys that do not depend on how rows arrive."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from page4.kernels.codecs import decode_kv, encode_int8_rows, encode_kv
from page4.kernels.errors import InputError
from page4.kernels.norm_rope import apply_rope, rms_norm_zero_centred, rotary_cos_sin
from page4.kernels.qsa_prepare import update_index_keys, write_kv_pages

DIM, ROTARY_DIM, THETA = 16, 8, 1e4


@pytest.mark.parametrize(("kv_format", "scale"), [("fp32", 1.0), ("fp16", 1.0), ("e4m3", 37.5)])
def test_each_row_lands_in_its_slot_and_nothing_else_moves(kv_format: str, scale: float) -> None:
    torch.manual_seed(0)
    values = 100.0 * torch.randn(5, 2, 8)
    pages = encode_kv(torch.full((4, 2, 16, 8), 3.0), kv_format, 1.0)
    before = pages.clone()
    slots = torch.tensor([17, -1, 0, 63, -1])
    write_kv_pages(values, pages, slots, kv_format, scale)
    encoded = encode_kv(values, kv_format, scale)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(pages[slot // 16, :, slot % 16], encoded[row])
            before[slot // 16, :, slot % 16] = encoded[row]
    assert torch.equal(pages, before)


def test_int8_rows_leave_their_scales_in_the_same_slots() -> None:
    torch.manual_seed(0)
    values = 100.0 * torch.randn(5, 2, 8)
    values[3, 1] = 0.0  # a row of zeros has a scale like any other
    pages = torch.full((4, 2, 16, 8), 0xFF, dtype=torch.uint8)
    scales = torch.full((4, 2, 16), torch.nan)
    slots = torch.tensor([17, -1, 0, 63, -1])
    write_kv_pages(values, pages, slots, "int8", 1.0, scales)
    codes, row_scales = encode_int8_rows(values)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(pages[slot // 16, :, slot % 16], codes[row])
            assert torch.equal(scales[slot // 16, :, slot % 16], row_scales[row])
    assert scales.isfinite().sum() == 3 * 2
    assert (pages != 0xFF).any(-1).sum() == 3 * 2


def test_int8_rows_of_zeros_infinities_and_nans() -> None:
    """Zeros decode to zeros, an infinity is stored as the largest number, a NaN spoils its own row only."""
    values = torch.ones(1, 4, 4)
    values[0, 0] = 0.0
    values[0, 1, 2] = -math.inf
    values[0, 2, 3] = math.nan
    pages = torch.full((1, 4, 16, 4), 0xFF, dtype=torch.uint8)
    scales = torch.full((1, 4, 16), torch.nan)
    write_kv_pages(values, pages, torch.tensor([5]), "int8", 1.0, scales)
    decoded = decode_kv(pages[0, :, 5], "int8") * scales[0, :, 5, None]
    assert (decoded[0] == 0).all() and scales[0, 0, 5] > 0
    assert pages[0, 1, 5].view(torch.int8).tolist() == [0, 0, -127, 0]
    assert scales[0, 1, 5] == torch.tensor(torch.finfo(torch.float32).max) / 127
    assert decoded[2].isnan().all()
    assert decoded[3].tolist() == pytest.approx([1.0] * 4)


def test_padding_does_not_reach_the_last_slot() -> None:
    pages = torch.full((2, 1, 16, 4), 7.0)
    write_kv_pages(torch.zeros(3, 1, 4), pages, torch.tensor([-1, -1, -1]), "fp32", 1.0)
    assert (pages == 7.0).all()


def test_no_rows_write_nothing() -> None:
    pages = torch.full((2, 1, 16, 4), 7.0)
    write_kv_pages(torch.zeros(0, 1, 4), pages, torch.zeros(0, dtype=torch.int64), "fp32", 1.0)
    assert (pages == 7.0).all()


@pytest.mark.parametrize("slots", [[0, 32], [0, -2], [0], [0.0, 1.0]])
def test_slots_that_do_not_exist_are_refused(slots: list[int]) -> None:
    with pytest.raises(InputError, match="slots"):
        write_kv_pages(torch.zeros(2, 1, 4), torch.zeros(2, 1, 16, 4), torch.tensor(slots), "fp32", 1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_scale_is_refused_at_the_write(scale: float) -> None:
    pages = torch.zeros(2, 1, 16, 4, dtype=torch.uint8)
    with pytest.raises(InputError, match="scale"):
        write_kv_pages(torch.ones(1, 1, 4), pages, torch.tensor([3]), "e4m3", scale)
    assert not pages.any()


def test_pages_of_another_format_or_shape_are_refused() -> None:
    slots = torch.tensor([0])
    with pytest.raises(InputError, match="uint8"):
        write_kv_pages(torch.ones(1, 1, 4), torch.zeros(2, 1, 16, 4), slots, "e4m3", 1.0)
    with pytest.raises(InputError, match="shape"):
        write_kv_pages(torch.ones(1, 2, 4), torch.zeros(2, 1, 16, 4), slots, "fp32", 1.0)


@pytest.mark.parametrize(
    ("kv_format", "scale", "scales", "message"),
    [
        ("int8", 1.0, None, "token scales belong to the format int8 and to no other"),
        ("e4m3", 1.0, torch.ones(2, 1, 16), "token scales belong to the format int8 and to no other"),
        (
            "int8",
            0.5,
            torch.ones(2, 1, 16),
            "int8 has a scale per token and head; scale must be 1.0, got 0.5",
        ),
        ("int8", 1.0, torch.ones(1, 2, 16), r"float32 \[2, 1, 16\], got torch.float32 \[1, 2, 16\]"),
        ("int8", 1.0, torch.ones(2, 1, 16).half(), "got torch.float16"),
    ],
)
def test_token_scales_that_do_not_fit_are_refused(
    kv_format: str, scale: float, scales: Tensor | None, message: str
) -> None:
    pages = torch.zeros(2, 1, 16, 4, dtype=torch.uint8)
    with pytest.raises(InputError, match=message):
        write_kv_pages(torch.ones(1, 1, 4), pages, torch.tensor([3]), kv_format, scale, scales)
    assert not pages.any()


class IndexCache:
    """The index keys of one request with room for 12 shuffled pages, in poisoned memory."""

    def __init__(self, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        self.ring = torch.full((capacity, DIM), torch.nan, dtype=dtype)
        self.pages = torch.full((20, 4, DIM), torch.nan, dtype=dtype)
        self.block_table = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:12]
        self.weight = torch.randn(DIM, generator=torch.Generator().manual_seed(2))

    def write(self, raw: Tensor, start: int) -> None:
        positions = torch.arange(start, start + len(raw))
        update_index_keys(
            raw[None],
            positions[None],
            self.ring[None],
            torch.tensor([0]),
            self.pages,
            self.block_table[None],
            self.weight,
            ROTARY_DIM,
            THETA,
        )

    def blocks(self, count: int) -> Tensor:
        """Compressed keys of the first blocks, in order. [count, Di]"""
        return self.pages[self.block_table].flatten(0, 1)[:count]

    def from_scratch(self, raw: Tensor) -> Tensor:
        """Compressed keys of all complete blocks by the definition, one block at a time."""
        keys = []
        for block in range(len(raw) // 4):
            mean = raw[4 * block : 4 * block + 4].to(self.ring.dtype).float().mean(0)
            cos, sin = rotary_cos_sin(torch.tensor([4 * block]), ROTARY_DIM, THETA)
            normed = rms_norm_zero_centred(mean, self.weight)
            keys.append(apply_rope(normed[None, None], cos, sin)[0, 0].to(self.pages.dtype))
        return torch.stack(keys) if keys else torch.empty(0, DIM, dtype=self.pages.dtype)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 63, 190])
def test_only_complete_blocks_are_compressed(length: int) -> None:
    torch.manual_seed(0)
    cache, raw = IndexCache(8), torch.randn(length, DIM)
    cache.write(raw, 0)
    complete = length // 4
    torch.testing.assert_close(cache.blocks(complete), cache.from_scratch(raw))
    assert cache.pages.isnan().all(-1).sum() == 80 - complete  # no other row was touched


def test_the_ring_keeps_the_newest_raw_keys() -> None:
    cache, raw = IndexCache(8), torch.randn(21, DIM)
    cache.write(raw, 0)
    for position in range(13, 21):
        assert torch.equal(cache.ring[position % 8], raw[position])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(20))
def test_the_split_of_rows_into_calls_does_not_change_a_bit(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    raw = torch.randn(draw.randint(1, 190), DIM)
    whole, pieces = IndexCache(draw.choice([4, 8, 12]), dtype), IndexCache(draw.choice([4, 8, 12]), dtype)
    whole.write(raw, 0)
    start = 0
    while start < len(raw):
        stop = start + draw.choice([1, 2, 3, 4, 5, 8, 33])
        pieces.write(raw[start:stop], start)
        start = stop
    complete = len(raw) // 4
    assert torch.equal(pieces.blocks(complete), whole.blocks(complete))
    torch.testing.assert_close(whole.blocks(complete), whole.from_scratch(raw))


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(5))
def test_rejected_draft_rows_leave_no_trace(seed: int, num_drafts: int) -> None:
    """Speculative steps: write 1 + K rows, keep some of them, and write again from the first rejected one."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    raw = torch.randn(60, DIM)
    cache = IndexCache(4 * math.ceil((4 + num_drafts) / 4))
    prompt = draw.randint(1, 9)
    cache.write(raw[:prompt], 0)
    committed = prompt
    while committed < len(raw) - num_drafts:
        accepted = draw.randint(0, num_drafts)
        rows = raw[committed : committed + 1 + num_drafts].clone()
        rows[1 + accepted :] = torch.randn(num_drafts - accepted, DIM)  # wrong drafts
        cache.write(rows, committed)
        committed += 1 + accepted
        complete = committed // 4
        torch.testing.assert_close(cache.blocks(complete), cache.from_scratch(raw[:committed]))


def test_requests_of_a_batch_do_not_mix() -> None:
    """Requests at different positions in the open block, in rows of the ring that are not in order."""
    torch.manual_seed(0)
    starts, rows = [0, 5, 14, 7], 6
    alone = [IndexCache(8) for _ in starts]
    texts = [torch.randn(start + rows, DIM) for start in starts]
    ring = torch.full((6, 8, DIM), torch.nan)
    requests, pages = torch.tensor([4, 0, 5, 2]), torch.full((80, 4, DIM), torch.nan)
    tables = torch.stack([alone[0].block_table + 20 * i for i in range(4)])
    for i, (cache, text, start) in enumerate(zip(alone, texts, starts, strict=True)):
        cache.write(text[:start], 0)
        ring[requests[i]], pages[20 * i : 20 * i + 20] = cache.ring, cache.pages
        cache.write(text[start:], start)
    raw = torch.stack([text[start:] for text, start in zip(texts, starts, strict=True)])
    positions = torch.tensor(starts)[:, None] + torch.arange(rows)
    update_index_keys(raw, positions, ring, requests, pages, tables, alone[0].weight, ROTARY_DIM, THETA)
    for i, cache in enumerate(alone):
        assert torch.equal(ring[requests[i]].nan_to_num(9.0), cache.ring.nan_to_num(9.0))
        assert torch.equal(pages[20 * i : 20 * i + 20].nan_to_num(9.0), cache.pages.nan_to_num(9.0))
    assert ring[[1, 3]].isnan().all()


def test_no_index_rows_write_nothing() -> None:
    cache = IndexCache(8)
    cache.write(torch.zeros(0, DIM), 0)
    assert cache.ring.isnan().all()


def test_stale_block_table_entries_are_not_dereferenced() -> None:
    cache = IndexCache(8)
    cache.block_table[2:] = 10**9
    cache.write(torch.randn(35, DIM), 0)  # 8 complete blocks are 2 pages; the open block's page is not needed
    assert not cache.pages[cache.block_table[:2]].isnan().any()


def call(**changes: object) -> None:
    arguments: dict[str, object] = {
        "raw": torch.zeros(1, 5, DIM),
        "positions": torch.arange(5)[None],
        "ring": torch.zeros(1, 8, DIM),
        "requests": torch.tensor([0]),
        "compressed_pages": torch.zeros(3, 4, DIM),
        "block_tables": torch.arange(3)[None],
        "norm_weight": torch.zeros(DIM),
        "rotary_dim": ROTARY_DIM,
        "theta": THETA,
    }
    update_index_keys(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": torch.tensor([[0, 1, 2, 4, 5]])},
        {"positions": torch.tensor([[4, 3, 2, 1, 0]])},
        {"positions": torch.arange(-1, 4)[None]},
        {"positions": torch.arange(4)[None]},
        {"positions": torch.arange(47, 52)[None]},  # completes block 12; three pages hold blocks 0..11
        {"ring": torch.zeros(1, 3, DIM)},
        {"ring": torch.zeros(1, 8, DIM + 1)},
        {"requests": torch.tensor([0, 0])},
        {"block_tables": torch.zeros(2, 3, dtype=torch.int64)},
        {"compressed_pages": torch.zeros(3, 5, DIM)},
    ],
)
def test_wrong_index_inputs_are_refused(changes: dict[str, object]) -> None:
    call()
    with pytest.raises(InputError):
        call(**changes)
