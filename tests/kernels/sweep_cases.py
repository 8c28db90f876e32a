"""Attention at real sizes for the sweep on a GPU: few shapes that together hold every pair of values."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from page4.kernels.block_plan import PackedPlan, pack_plan
from page4.kernels.block_select import BlockPlan, select_blocks, union_plan
from page4.kernels.codecs import BYTE_FLOATS, STORAGE_DTYPES, decode_kv, encode_int8_rows, encode_kv
from page4.kernels.page4_attention import page4_attention_reference
from page4.kernels.page4_attention_inputs import AttentionInputs
from tests.kernels.attention_cases import FORMATS, STALE

TOPK = 512
FACTORS: dict[str, tuple[Any, ...]] = {
    "requests": (1, 4, 16),
    "rows": (1, 2, 3, 4, 5, 6, 7, 8),
    "heads": ((6, 1), (24, 2), (16, 1), (8, 8)),
    "dim": (64, 128, 256),
    "context": (5, 61, 516, 2047, 8195, 32768),
    "kv_format": tuple(FORMATS),
    "padding_groups": (0, 2),
}
_MOST_ELEMENTS = 2**28  # of K: several processes share the memory of a GPU


@dataclass(frozen=True)
class Shape:
    """One call of the sweep; ``heads`` are those of queries and of K and V."""

    requests: int
    rows: int
    heads: tuple[int, int]
    dim: int
    context: int
    kv_format: str
    padding_groups: int

    @property
    def fits(self) -> bool:
        return self.requests * self.context * self.heads[1] * self.dim <= _MOST_ELEMENTS

    def __str__(self) -> str:
        heads = f"{self.heads[0]}/{self.heads[1]}"
        padding = f"+{self.padding_groups}" if self.padding_groups else ""
        return f"{self.requests}x{self.rows}{padding}-{heads}-{self.dim}-{self.context}-{self.kv_format}"


def pairs_of(shape: Shape) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two factors with their values."""
    return set(combinations(vars(shape).items(), 2))


def covering_shapes() -> list[Shape]:
    """Shapes in which every pair of values of two factors occurs, found greedily and always the same.

    The whole product has tens of thousands, each of which has to be compiled.
    """
    draw = random.Random(0)
    missing = {
        pair: None
        for a, b in combinations(FACTORS, 2)
        for pair in product([(a, x) for x in FACTORS[a]], [(b, y) for y in FACTORS[b]])
    }
    shapes: list[Shape] = []
    while missing:
        # A candidate has a missing pair, so that every turn covers at least one.
        wanted = dict(next(iter(missing)))
        candidates = []
        while len(candidates) < 60:
            values = {name: draw.choice(choices) for name, choices in FACTORS.items()} | wanted
            if (candidate := Shape(**values)).fits:
                candidates.append(candidate)
        shapes.append(max(candidates, key=lambda shape: len(pairs_of(shape) & missing.keys())))
        for pair in pairs_of(shapes[-1]):
            missing.pop(pair, None)
    return shapes


@dataclass
class SweepCase:
    """Inputs in permuted pages with NaN in every slot that no row sees, and what float64 makes of them.

    Attributes:
        inputs: with padding groups at the end, whose lists are undefined and whose rows hold NaN.
        live_rows: rows of ``inputs.q`` that belong to a group.
        k, v: values of all tokens as an FP16 (or FP32) cache would hold them, ``[B, T, Hkv, D]``.
        sees: ``[N, T]``, true where a row attends to a token.
        expected, expected_lse: float64 ``[N, Hq, D]`` and ``[N, Hq]``.
    """

    inputs: AttentionInputs
    live_rows: int
    k: Tensor
    v: Tensor
    sees: Tensor
    expected: Tensor
    expected_lse: Tensor

    def eager(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same attention by plain operations in ``dtype``: product, softmax, product, gate."""
        inputs, rows = self.inputs, self.live_rows // len(self.k)
        group = inputs.heads_per_kv
        outs, lses = [], []
        for request in range(len(self.k)):
            here = slice(request * rows, (request + 1) * rows)
            k, v = (x[request].to(dtype).repeat_interleave(group, dim=1) for x in (self.k, self.v))
            q = inputs.q[here].to(dtype)
            scores = torch.einsum("rhd,thd->rht", q, k) * inputs.softmax_scale
            scores = scores.masked_fill(~self.sees[here, None], -torch.inf)
            outs.append(torch.einsum("rht,thd->rhd", scores.softmax(-1), v))
            lses.append(scores.logsumexp(-1))
        assert inputs.gate is not None
        return torch.cat(outs) * inputs.gate[: self.live_rows].to(dtype).sigmoid(), torch.cat(lses)


def padded_plan(plan: PackedPlan, groups: int) -> PackedPlan:
    """The plan with padding groups after it, whose lists and counts hold garbage."""

    def longer(values: Tensor, fill: int) -> Tensor:
        return torch.cat((values, values.new_full((groups, *values.shape[1:]), fill)))

    return PackedPlan(
        blocks=longer(plan.blocks, STALE),
        counts=longer(plan.counts, STALE),
        masks=longer(plan.masks, -1),
        group_request=longer(plan.group_request, -1),
        group_start=longer(plan.group_start, 0),
        group_rows=longer(plan.group_rows, 0),
    )


def sweep_case(shape: Shape, device: str = "cuda") -> SweepCase:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if shape.kv_format == "fp32" else torch.float16
    query_heads, kv_heads = shape.heads
    requests, length, dim = shape.requests, shape.context, shape.dim
    rows = min(shape.rows, length)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    used = -(-length // 16)
    pool = requests * used + 3
    tables = torch.full((requests, used + 2), STALE, device=device)
    order = torch.randperm(pool, generator=generator, device=device)
    tables[:, :used] = order[: requests * used].view(requests, used)

    positions = torch.arange(length - rows, length, device=device).repeat(requests)
    visible = (positions + 1) // 4
    noise = torch.rand(len(positions), int(visible.max()), generator=generator, device=device)
    selected = select_blocks(noise, visible, TOPK)
    plan = union_plan(selected, positions, rows, requests=requests)
    sees = selected.new_zeros(len(positions), length)
    sees[:, : 4 * selected.shape[1]] = selected.repeat_interleave(4, dim=1)
    token = torch.arange(length, device=device)
    sees |= (token >= 4 * visible[:, None]) & (token <= positions[:, None])
    request, token = sees.view(requests, rows, length).any(1).nonzero(as_tuple=True)  # what somebody sees
    place = (tables[request, token // 16], slice(None), token % 16)

    scale = 6.0 / BYTE_FLOATS[shape.kv_format].max_value if shape.kv_format in BYTE_FLOATS else 1.0
    stored, values, scales = [], [], []
    for _ in range(2):
        x = normal(len(token), kv_heads, dim)
        poison = 0xFF if STORAGE_DTYPES[shape.kv_format] == torch.uint8 else torch.nan
        pages = torch.full(
            (pool, kv_heads, 16, dim), poison, dtype=STORAGE_DTYPES[shape.kv_format], device=device
        )
        if shape.kv_format == "int8":
            codes, row_scales = encode_int8_rows(x)
            page_scales = torch.full((pool, kv_heads, 16), torch.nan, device=device)
            page_scales[place] = row_scales
            scales.append(page_scales)
            kept = decode_kv(codes, "int8") * row_scales[..., None]
        else:
            codes = encode_kv(x, shape.kv_format, scale)
            kept = decode_kv(codes, shape.kv_format) * scale
        pages[place] = codes
        stored.append(pages)
        dense = torch.zeros(requests, length, kv_heads, dim, dtype=dtype, device=device)
        dense[request, token] = kept.to(dtype)
        values.append(dense)

    both = normal(len(positions) + shape.padding_groups * rows, query_heads, 2 * dim)
    both[len(positions) :] = torch.nan
    q, gate = both.chunk(2, dim=-1)
    inputs = AttentionInputs(
        q=q,
        k_pages=stored[0],
        v_pages=stored[1],
        block_tables=tables,
        plan=padded_plan(pack_plan(plan, len(positions), requests), shape.padding_groups),
        rows_per_group=rows,
        kv_format=shape.kv_format,
        k_scale=scale,
        v_scale=scale,
        softmax_scale=dim**-0.5,
        gate=gate,
        k_token_scales=scales[0] if scales else None,
        v_token_scales=scales[1] if scales else None,
    )
    out, lse = float64_reference(inputs, plan, len(positions))
    return SweepCase(inputs, len(positions), values[0], values[1], sees, out, lse)


def float64_reference(inputs: AttentionInputs, plan: BlockPlan, rows: int) -> tuple[Tensor, Tensor]:
    out, lse = page4_attention_reference(
        inputs.q[:rows].double().contiguous(), inputs.k_pages, inputs.v_pages, inputs.block_tables, plan,
        inputs.kv_format, inputs.k_scale, inputs.v_scale, inputs.softmax_scale,
        inputs.k_token_scales, inputs.v_token_scales,
    )  # fmt: skip
    assert inputs.gate is not None
    return out * inputs.gate[:rows].double().sigmoid(), lse
