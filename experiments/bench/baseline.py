"""Grouped attention in plain PyTorch: gather the listed tokens, decode them, scaled dot-product attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.codecs import BYTE_FLOATS, STORAGE_DTYPES, decode_kv
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.qsa_prepare import PAGE_TOKENS

_NATIVE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SLAB_BYTES = 2**31  # of gathered K or V at a time


class GatherAttention:
    """The contract of grouped attention by gather and SDPA, ready to be captured in a CUDA graph.

    What depends on the plan alone, the mask, is made here and not in the call: SDPA takes no plan. The call
    looks up pages, gathers, decodes to q's dtype, attends and applies the gate. K and V scales of a tensor
    are folded into the softmax and the output, as the kernels do.

    Every group must have ``rows_per_group`` rows, and tokens that no row sees must be finite. Synchronises
    with the device on construction.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs
        plan, q = inputs.plan, inputs.q
        # Lists are cut to the longest, rounded up to what makes 16 bytes of mask.
        width = -(-int(plan.counts.max()) // 2) * 2
        blocks, masks = (pad(x, (0, 1))[:, :width] for x in (plan.blocks, plan.masks))
        listed = torch.arange(width, device=q.device) < plan.counts[:, None]
        self.blocks = torch.where(listed, blocks, 0).long()
        bit = torch.arange(BLOCK_TOKENS * inputs.rows_per_group, device=q.device)
        sees = ((masks[..., None] >> bit) & 1).bool() & listed[..., None]  # [G, U, 4 M]
        sees = sees.unflatten(2, (-1, BLOCK_TOKENS)).transpose(1, 2).flatten(2)  # [G, M, L]
        bias = torch.zeros(sees.shape, dtype=q.dtype, device=q.device).masked_fill_(~sees, -torch.inf)
        # Query heads of a KV head become rows: [G, 1, M * heads, L].
        self.bias = bias.repeat_interleave(inputs.heads_per_kv, dim=1)[:, None]
        table = torch.arange(256, dtype=torch.uint8, device=q.device)
        self.values = (
            decode_kv(table, inputs.kv_format).to(q.dtype) if inputs.kv_format in BYTE_FLOATS else None
        )
        per_group = width * BLOCK_TOKENS * inputs.kv_heads * inputs.head_dim * q.element_size()
        self.groups_at_once = max(1, _SLAB_BYTES // per_group)

    def __call__(self) -> Tensor:
        """Attention of all rows, ``[N, Hq, D]`` in q's dtype."""
        inputs = self.inputs
        slabs = [self._slab(start) for start in range(0, inputs.groups, self.groups_at_once)]
        out = (slabs[0] if len(slabs) == 1 else torch.cat(slabs)).view_as(inputs.q)
        if inputs.gate is not None:
            out = (out.float() * inputs.gate.float().sigmoid()).to(out.dtype)
        return out

    def _slab(self, start: int) -> Tensor:
        inputs, plan = self.inputs, self.inputs.plan
        part = slice(start, start + self.groups_at_once)
        blocks = self.blocks[part]
        per_page = PAGE_TOKENS // BLOCK_TOKENS
        tables = inputs.block_tables[plan.group_request[part].long()]  # [g, pages]
        page = tables.gather(1, blocks // per_page)
        first = (page * inputs.kv_heads * per_page + blocks % per_page)[..., None]  # of KV head 0
        head = torch.arange(inputs.kv_heads, device=blocks.device) * per_page
        index = (first + head).flatten()  # rows of one block of one head
        k = self._gather(inputs.k_pages, inputs.k_token_scales, index, len(blocks))
        v = self._gather(inputs.v_pages, inputs.v_token_scales, index, len(blocks))
        size = inputs.rows_per_group
        q = inputs.q[start * size : (start + len(blocks)) * size]
        q = q.view(len(blocks), size, inputs.kv_heads, inputs.heads_per_kv, inputs.head_dim).transpose(1, 2)
        out = scaled_dot_product_attention(
            q.flatten(2, 3), k, v,
            attn_mask=self.bias[part].expand(-1, inputs.kv_heads, -1, -1),
            scale=inputs.softmax_scale * inputs.k_scale,
        )  # fmt: skip
        out = out.unflatten(2, (size, inputs.heads_per_kv)).transpose(1, 2)  # [g, M, Hkv, heads, D]
        if inputs.v_scale != 1.0:
            out = out * inputs.v_scale
        return out.reshape(-1, q.shape[1] * q.shape[3], inputs.head_dim)

    def _gather(self, pages: Tensor, scales: Tensor | None, index: Tensor, groups: int) -> Tensor:
        """K or V of the listed tokens, ``[g, Hkv, L, D]`` in q's dtype."""
        inputs = self.inputs
        rows = pages.view(-1, BLOCK_TOKENS * inputs.head_dim).index_select(0, index)
        if inputs.kv_format in _NATIVE:
            values = rows.view(_NATIVE[inputs.kv_format]).to(inputs.q.dtype)
        elif inputs.kv_format == "int8":
            assert scales is not None
            factor = scales.view(-1, BLOCK_TOKENS).index_select(0, index)[..., None]
            tokens = rows.view(torch.int8).view(-1, BLOCK_TOKENS, inputs.head_dim)
            values = (tokens * factor).to(inputs.q.dtype)
        elif self.values is not None:
            values = self.values.index_select(0, rows.view(-1).int())
        else:
            assert STORAGE_DTYPES[inputs.kv_format] == inputs.q.dtype
            values = rows
        values = values.view(groups, -1, inputs.kv_heads, BLOCK_TOKENS, inputs.head_dim)
        return values.transpose(1, 2).flatten(2, 3)
