"""Requests with paged caches for the tests of attention kernels, and what float64 says of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.kernels.block_plan import PackedPlan, pack_plan
from page4.kernels.block_select import select_blocks, union_plan
from page4.kernels.codecs import decode_kv, encode_int8_rows, encode_kv
from page4.kernels.page4_attention_inputs import AttentionInputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = {"fp32": torch.nan, "fp16": torch.nan}  # byte formats: 0xFF, a NaN where there is one
FORMATS = ["fp32", "fp16", "e4m3", "e5m2", "e3m4", "e2m5", "int8"]
STALE = 10**9  # a block-table entry that names no page


@dataclass
class Case:
    """Requests of one length whose last rows are attended, in shuffled pages with stale block tables."""

    inputs: AttentionInputs
    expected: Tensor  # float64 [N, Hq, D]
    expected_lse: Tensor
    magnitude: Tensor  # float64 [N, Hq, D], like expected but with |V|

    def check(self, out: Tensor, lse: Tensor) -> None:
        assert_near(out, self.expected, self.magnitude)
        torch.testing.assert_close(lse.double(), self.expected_lse, rtol=1e-5, atol=2e-5)


def assert_near(out: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Each element within the roundings of FP16: of probabilities, of scaled int8 values and of the output.

    ``magnitude`` is ``sum_t p_t |v_t|``, to which the error of a rounded factor is proportional. The rest is
    FP32 arithmetic, and probabilities below the normal numbers of FP16.
    """
    roundings = 0 if out.dtype == torch.float32 else 3
    bound = (roundings * 2.0**-11 + 1e-5) * magnitude
    assert ((out.double() - expected).abs() <= bound).all()


def on_device(plan: PackedPlan) -> PackedPlan:
    return PackedPlan(**{name: values.to(DEVICE) for name, values in vars(plan).items()})


def make_case(
    length: int = 77,
    rows: int = 4,
    requests: int = 1,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 32,
    topk: int = 6,
    kv_format: str = "fp16",
    dtype: torch.dtype = torch.float16,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    rows_per_group: int = 4,
    gate: bool = False,
    decades: float = 0.0,
    seed: int = 0,
) -> Case:
    """``decades``: powers of ten that int8 scales of V spread over; then every fifth token's V is 0, too."""
    torch.manual_seed(seed)
    used = -(-length // 16)
    pool = requests * used + 3
    tables = torch.full((requests, used + 2), STALE)
    tables[:, :used] = torch.randperm(pool)[: requests * used].view(requests, used)
    position = torch.arange(length)
    tokens, pages, token_scales = [], [], []
    for scale in (k_scale, v_scale):
        values = scale * torch.randn(requests, length, kv_heads, dim)
        if kv_format == "int8":
            values *= 0.1 + torch.rand(requests, length, kv_heads, 1)
            if decades and tokens:
                values *= 10 ** (decades * (torch.rand(requests, length, kv_heads, 1) - 0.5))
                values[:, ::5] = 0
            stored, row_scales = encode_int8_rows(values)
            paged_scales = torch.full((pool, kv_heads, 16), torch.nan)
            paged_scales[tables[:, position // 16], :, position % 16] = row_scales
            token_scales.append(paged_scales.to(DEVICE))
            tokens.append(decode_kv(stored, kv_format).double() * row_scales[..., None].double())
        else:
            stored = encode_kv(values, kv_format, scale)
            tokens.append(decode_kv(stored, kv_format).double() * scale)
        paged = torch.full((pool, kv_heads, 16, dim), POISON.get(kv_format, 0xFF), dtype=stored.dtype)
        paged[tables[:, position // 16], :, position % 16] = stored
        pages.append(paged)

    rows = min(rows, length)
    positions = torch.arange(length - rows, length).repeat(requests)
    visible = (positions + 1) // 4
    selected = select_blocks(torch.rand(len(positions), int(visible.max())), visible, topk)
    plan = union_plan(selected, positions, rows_per_group, requests=requests)
    # The query is the first half of each head of a projection, the gate the other.
    both = torch.randn(len(positions), kv_heads * group, 2 * dim)
    both[..., :dim] /= k_scale
    both = both.to(dtype)
    q, gates = both.chunk(2, dim=-1)
    # Halves of one tensor on the device, too: moving a half would make it contiguous.
    q_there, gates_there = both.to(DEVICE).chunk(2, dim=-1)
    inputs = AttentionInputs(
        q=q_there,
        k_pages=pages[0].to(DEVICE),
        v_pages=pages[1].to(DEVICE),
        block_tables=tables.to(DEVICE),
        plan=on_device(pack_plan(plan, len(positions), requests)),
        rows_per_group=rows_per_group,
        kv_format=kv_format,
        k_scale=1.0 if kv_format == "int8" else k_scale,
        v_scale=1.0 if kv_format == "int8" else v_scale,
        softmax_scale=dim**-0.5,
        gate=gates_there if gate else None,
        k_token_scales=token_scales[0] if token_scales else None,
        v_token_scales=token_scales[1] if token_scales else None,
    )
    sees = torch.zeros(len(positions), length + 4, dtype=torch.bool)
    sees[:, : 4 * selected.shape[1]] = selected.repeat_interleave(4, dim=1)
    token = torch.arange(length)
    tail = token >= 4 * visible[:, None]
    sees = (sees[:, :length] | tail) & (token <= positions[:, None])
    k, v = (
        x.repeat_interleave(group, dim=2).repeat_interleave(rows, dim=0) for x in tokens
    )  # [N, length, Hq, D]
    scores = torch.einsum("nhd,nthd->nht", q.double(), k) * inputs.softmax_scale
    scores = scores.masked_fill(~sees[:, None], -torch.inf)
    factor = gates.double().sigmoid() if gate else torch.ones(())
    expected, magnitude = (
        (factor * torch.einsum("nht,nthd->nhd", scores.softmax(-1), x)).to(DEVICE) for x in (v, v.abs())
    )
    return Case(inputs, expected, scores.logsumexp(-1).to(DEVICE), magnitude)
