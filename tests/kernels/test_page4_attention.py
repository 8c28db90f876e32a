"""Sparse attention over pages: equal to dense masked softmax in float64, whatever lies in unused memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from page4.kernels.block_select import BlockPlan, select_blocks, union_plan
from page4.kernels.codecs import decode_kv, encode_int8_rows, encode_kv
from page4.kernels.errors import InputError
from page4.kernels.page4_attention import page4_attention_reference

POISON = {"fp32": torch.nan, "fp16": torch.nan, "e4m3": 0xFF, "int8": 0xFF}


@dataclass
class Case:
    """One request whose last rows are attended, in shuffled pages with a stale block table."""

    q: Tensor  # [R, Hq, D]
    k: Tensor  # [length, Hkv, D] decoded, scaled
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    selected: Tensor  # [R, nb]
    positions: Tensor  # [R]
    kv_format: str = "fp32"
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_token_scales: Tensor | None = None
    v_token_scales: Tensor | None = None

    @property
    def softmax_scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def plan(self, rows_per_group: int) -> BlockPlan:
        return union_plan(self.selected, self.positions, rows_per_group)

    def run(self, rows_per_group: int = 4) -> tuple[Tensor, Tensor]:
        return page4_attention_reference(
            self.q, self.k_pages, self.v_pages, self.block_table[None], self.plan(rows_per_group),
            self.kv_format, self.k_scale, self.v_scale, self.softmax_scale,
            self.k_token_scales, self.v_token_scales,
        )  # fmt: skip

    def dense(self) -> tuple[Tensor, Tensor]:
        """Masked softmax over all tokens in float64."""
        token = torch.arange(len(self.k))
        in_block = torch.zeros(len(self.positions), len(self.k), dtype=torch.bool)
        expanded = self.selected.repeat_interleave(4, dim=1)[:, : len(self.k)]
        in_block[:, : expanded.shape[1]] = expanded
        tail = token >= 4 * ((self.positions[:, None] + 1) // 4)
        sees = (in_block | tail) & (token <= self.positions[:, None])  # [R, length]
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("rhd,thd->rht", self.q.double(), k) * self.softmax_scale
        scores = scores.masked_fill(~sees[:, None], -torch.inf)
        return torch.einsum("rht,thd->rhd", scores.softmax(-1), v), scores.logsumexp(-1)


def make_case(
    length: int = 77,
    rows: int = 4,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 32,
    topk: int = 6,
    kv_format: str = "fp32",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    seed: int = 0,
) -> Case:
    torch.manual_seed(seed)
    num_pages = -(-length // 16)
    pool = num_pages + 3
    block_table = torch.full((num_pages + 2,), 10**9)  # entries beyond the length are stale
    block_table[:num_pages] = torch.randperm(pool)[:num_pages]
    tokens, pages, token_scales = [], [], []
    for scale in (k_scale, v_scale):
        values = scale * torch.randn(length, kv_heads, dim)
        if kv_format == "int8":
            stored, row_scales = encode_int8_rows(values * (0.1 + torch.rand(length, kv_heads, 1)))
            tokens.append(decode_kv(stored, kv_format) * row_scales[..., None])
            paged_scales = torch.full((pool, kv_heads, 16), torch.nan)
            for position in range(length):
                paged_scales[block_table[position // 16], :, position % 16] = row_scales[position]
            token_scales.append(paged_scales)
        else:
            stored = encode_kv(values, kv_format, scale)
            tokens.append(decode_kv(stored, kv_format) * scale)
        paged = torch.full((pool, kv_heads, 16, dim), POISON[kv_format], dtype=stored.dtype)
        for position in range(length):
            paged[block_table[position // 16], :, position % 16] = stored[position]
        pages.append(paged)
    positions = torch.arange(length - min(rows, length), length)
    visible = (positions + 1) // 4
    scores = torch.randn(len(positions), int(visible.max()))
    return Case(
        q=torch.randn(len(positions), kv_heads * group, dim) / k_scale,
        k=tokens[0], v=tokens[1], k_pages=pages[0], v_pages=pages[1], block_table=block_table,
        selected=select_blocks(scores, visible, topk), positions=positions,
        kv_format=kv_format, k_scale=k_scale, v_scale=v_scale,
        k_token_scales=token_scales[0] if token_scales else None,
        v_token_scales=token_scales[1] if token_scales else None,
    )  # fmt: skip


def assert_equals_dense(case: Case, rows_per_group: int = 4) -> None:
    out, lse = case.run(rows_per_group)
    expected_out, expected_lse = case.dense()
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-4, atol=1e-5 * case.v_scale)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "e4m3", "int8"])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 12), (2, 6), (4, 3), (2, 5)])
def test_heads_and_dimensions(kv_heads: int, group: int, dim: int, kv_format: str) -> None:
    assert_equals_dense(make_case(kv_heads=kv_heads, group=group, dim=dim, kv_format=kv_format))


@pytest.mark.parametrize("kv_format", ["fp16", "e4m3", "int8"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 15, 16, 17, 63, 64, 65, 257, 1000, 5000])
def test_lengths(length: int, kv_format: str) -> None:
    assert_equals_dense(make_case(length=length, topk=64, kv_format=kv_format))


@pytest.mark.parametrize("rows_per_group", [1, 2, 7, 8, 64])
def test_the_grouping_of_rows_does_not_matter(rows_per_group: int) -> None:
    assert_equals_dense(make_case(length=300, rows=21, topk=9, kv_format="e4m3"), rows_per_group)


def test_a_whole_prompt_in_groups() -> None:
    assert_equals_dense(make_case(length=203, rows=203, topk=10), 64)


@pytest.mark.parametrize("rows_per_group", [1, 4, 8])
def test_requests_of_a_batch_do_not_mix(rows_per_group: int) -> None:
    """Requests of different lengths in one pool of pages, and a slab that holds several groups."""
    cases = [make_case(length=length, rows=7, seed=length) for length in (9, 77, 200)]
    offsets = [0]
    for case in cases:
        offsets.append(offsets[-1] + len(case.k_pages))
    columns = max(len(case.block_table) for case in cases)
    tables = torch.full((3, columns), 10**9)
    for table, case, offset in zip(tables, cases, offsets, strict=False):
        used = len(case.k) // 16 + 1
        table[:used] = case.block_table[:used] + offset
    width = max(case.selected.shape[1] for case in cases)
    selected = torch.cat(
        [torch.nn.functional.pad(case.selected, (0, width - case.selected.shape[1])) for case in cases]
    )
    plan = union_plan(selected, torch.cat([case.positions for case in cases]), rows_per_group, requests=3)
    out, lse = page4_attention_reference(
        torch.cat([case.q for case in cases]),
        torch.cat([case.k_pages for case in cases]),
        torch.cat([case.v_pages for case in cases]),
        tables, plan, "fp32", 1.0, 1.0, cases[0].softmax_scale,
    )  # fmt: skip
    for case, got_out, got_lse in zip(cases, out.split(7), lse.split(7), strict=True):
        expected_out, expected_lse = case.dense()
        torch.testing.assert_close(got_out.double(), expected_out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got_lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("v_scale", [2.0**-12, 1.0, 37.5])
@pytest.mark.parametrize("k_scale", [2.0**-12, 0.3, 37.5])
def test_scales_far_from_one_are_applied_once(k_scale: float, v_scale: float) -> None:
    assert_equals_dense(make_case(kv_format="e4m3", k_scale=k_scale, v_scale=v_scale))


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "e4m3"])
@pytest.mark.parametrize("poisoned", ["k", "v", "both"])
def test_poison_in_unused_slots_and_pages_does_not_leak(poisoned: str, kv_format: str) -> None:
    """make_case poisons both: cleaning one side shows that the other side alone is harmless."""
    case = make_case(length=77, kv_format=kv_format)  # the last page holds 13 of 16 tokens
    expected, _ = case.run()
    assert expected.isfinite().all()
    zero = torch.zeros((), dtype=case.k_pages.dtype)
    for name in {"k": ["v_pages"], "v": ["k_pages"], "both": []}[poisoned]:
        pages = getattr(case, name)
        is_poison = pages == 0xFF if kv_format == "e4m3" else pages.isnan()
        assert is_poison.any()
        setattr(case, name, torch.where(is_poison, zero, pages))
    assert torch.equal(case.run()[0], expected)


@pytest.mark.parametrize("poisoned", ["k_token_scales", "v_token_scales"])
def test_poison_in_scales_of_unseen_slots_does_not_leak(poisoned: str) -> None:
    """make_case writes NaN scales wherever no token lies: the codes there decode to NaN, unseen."""
    case = make_case(length=77, kv_format="int8")
    scales = getattr(case, poisoned)
    assert scales[case.block_table[4], :, 13:].isnan().all()
    clean = replace(case, **{poisoned: scales.nan_to_num(1.0)})
    assert_equals_dense(case)
    assert torch.equal(case.run()[0], clean.run()[0])


def test_padding_blocks_do_not_read_page_zero() -> None:
    case = make_case(length=77, rows=8, kv_format="e4m3")
    poison = torch.full_like(case.k_pages[:1], 0xFF)
    case = replace(
        case,
        k_pages=torch.cat((poison, case.k_pages)),
        v_pages=torch.cat((poison, case.v_pages)),
        block_table=case.block_table + 1,
    )
    plan = case.plan(2)
    assert (plan.blocks == -1).any()  # groups differ in length, so some are padded
    assert_equals_dense(case, 2)


def test_unselected_tokens_may_hold_anything() -> None:
    case = make_case(length=300, topk=5, rows=1)
    expected = case.run()
    for position in range(300):  # 300 is a multiple of 4: there is no tail
        if not case.selected[0, position // 4]:
            for pages in (case.k_pages, case.v_pages):
                pages[case.block_table[position // 16], :, position % 16] = torch.nan
    assert torch.equal(case.run()[0], expected[0])


def test_block_table_entries_of_unread_pages_are_not_dereferenced() -> None:
    case = make_case(length=400, topk=3, rows=2)
    expected = case.run()
    read = set((case.plan(2).blocks // 4).flatten().tolist())
    for page in range(len(case.block_table)):
        if page not in read:
            case.block_table[page] = -(10**9)
    assert torch.equal(case.run()[0], expected[0])


def test_pages_may_be_in_any_order() -> None:
    case = make_case(length=200)
    expected = case.run()
    order = torch.randperm(len(case.k_pages))
    used = case.block_table < len(order)
    moved = replace(
        case,
        k_pages=case.k_pages[order],
        v_pages=case.v_pages[order],
        block_table=torch.where(used, order.argsort()[case.block_table.clamp(max=len(order) - 1)], 10**9),
    )
    assert torch.equal(moved.run()[0], expected[0])


def test_products_beyond_fp16_stay_finite() -> None:
    """K of the largest code, q of one, D = 256: the product is 114,688, beyond FP16's 65,504."""
    case = make_case(dim=256, kv_format="e4m3", length=32)
    case.k_pages.fill_(0x7E)
    case = replace(case, q=torch.ones_like(case.q).half())
    out, lse = page4_attention_reference(
        case.q, case.k_pages, case.v_pages, case.block_table[None], case.plan(4), "e4m3", 1.0, 1.0, 1.0
    )  # fmt: skip
    seen = case.plan(1).token_mask.sum(dim=(1, 2, 3))  # equal scores: the logarithm counts tokens
    torch.testing.assert_close(lse, (114_688 + seen.log())[:, None].expand_as(lse))
    assert out.isfinite().all()


def test_equal_keys_average_the_values() -> None:
    case = make_case(length=32, rows=1, topk=100)
    case.k_pages.zero_()
    out, lse = case.run()
    torch.testing.assert_close(out[0, ::3], case.v.mean(0))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(32)))


def test_rows_without_tokens_give_zero_and_minus_infinity() -> None:
    case = make_case(rows=4)
    case.positions[1] = -1  # a padded row inside a group
    case.selected[1] = False
    out, lse = case.run()
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    assert out.isfinite().all() and lse[[0, 2, 3]].isfinite().all()
    case.positions.fill_(-1)
    case.selected.fill_(False)
    out, lse = case.run()
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_float64_queries_compute_in_float64() -> None:
    case = make_case(length=500, topk=30)
    case = replace(case, q=case.q.double())
    out, lse = case.run()
    expected_out, expected_lse = case.dense()
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_non_contiguous_pages_are_read_correctly() -> None:
    case = make_case()
    strided = case.k_pages.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    assert torch.equal(replace(case, k_pages=strided).run()[0], case.run()[0])


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_not_positive_finite_numbers_are_refused(name: str, value: float) -> None:
    case = make_case(kv_format="e4m3")
    setattr(case, name, value)
    with pytest.raises(InputError, match=name):
        case.run()


def test_a_page_that_does_not_exist_is_refused() -> None:
    case = make_case()
    case.block_table[(len(case.k) - 1) // 16] = len(case.k_pages)  # the tail's page is always read
    with pytest.raises(InputError, match="block table"):
        case.run()


def test_a_plan_longer_than_the_block_table_is_refused() -> None:
    case = make_case()
    with pytest.raises(InputError, match="block table"):
        replace(case, block_table=case.block_table[:2]).run()


@pytest.mark.parametrize(
    "change",
    [
        lambda case: replace(case, kv_format="e4m3"),
        lambda case: replace(case, kv_format="fp7"),
        lambda case: replace(case, v_pages=case.v_pages[:-1]),
        lambda case: replace(case, k_token_scales=torch.ones(case.k_pages.shape[:3])),
        lambda case: replace(make_case(kv_format="int8"), v_token_scales=None),
        lambda case: replace(make_case(kv_format="int8"), v_token_scales=torch.ones(3, 2, 16)),
        lambda case: replace(make_case(kv_format="int8"), kv_format="e4m3"),
        lambda case: replace(case, q=case.q[:, :5]),
        lambda case: replace(case, q=case.q[..., :-1]),
        lambda case: replace(case, block_table=case.block_table[:0]),
    ],
)
def test_inputs_that_disagree_are_refused(change: object) -> None:
    with pytest.raises(InputError):
        change(make_case()).run()  # type: ignore[operator]
