"""The sparse decode kernel of the vllm package on the same inputs, where that package is installed.

``vllm.models.qwen4_exp.nvidia.ops.qsa.qsa_sparse_paged_attention`` (seen in vllm 0.33.0) takes each row's
token list instead of a plan and reads K and V once per row. It wants bfloat16 queries; of the formats here it
reads e4m3 alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.page4_attention_inputs import AttentionInputs

_MODULE = "vllm.models.qwen4_exp.nvidia.ops.qsa"


def load_peer() -> Callable[..., Any] | str:
    """The kernel's launcher, or why there is none."""
    try:
        launcher: Callable[..., Any] = importlib.import_module(_MODULE).qsa_sparse_paged_attention
    except ImportError as error:
        return f"{_MODULE} cannot be imported ({' '.join(str(error).split())})"
    except AttributeError:
        return f"{_MODULE} has no qsa_sparse_paged_attention"
    return launcher


class PeerAttention:
    """A call of the peer, ready to be captured; ``q`` and ``gate`` are what it computes with.

    The token lists, which the peer's own selection writes, and the conversions to bfloat16 are made here and
    not in the call. Rows are prefill rows for the peer's table of configurations when groups have 8 rows.
    """

    def __init__(self, inputs: AttentionInputs, launcher: Callable[..., Any], topk: int) -> None:
        assert inputs.gate is not None and inputs.kv_format == "e4m3"
        self._launcher = launcher
        self.q = inputs.q.bfloat16()
        self.gate = inputs.gate.bfloat16().contiguous()
        tokens, request = row_tokens(inputs, BLOCK_TOKENS * topk + BLOCK_TOKENS - 1)
        self._arguments = {
            "q": self.q,
            "k_cache": inputs.k_pages.view(torch.float8_e4m3fn).transpose(1, 2),
            "v_cache": inputs.v_pages.view(torch.float8_e4m3fn).transpose(1, 2),
            "logical_indices": tokens,
            "block_table": inputs.block_tables.int(),
            "token_to_req": request,
            "use_prefill_config": inputs.rows_per_group == 8,
            "out": torch.empty_like(self.q),
            "k_scale": inputs.k_scale,
            "v_scale": inputs.v_scale,
            "output_gate": self.gate,
        }

    def __call__(self) -> Tensor:
        """Attention of all rows, ``[N, Hq, D]`` in bfloat16."""
        out: Tensor = self._launcher(**self._arguments)
        return out


def row_tokens(inputs: AttentionInputs, width: int) -> tuple[Tensor, Tensor]:
    """The tokens that every row sees, ascending, and every row's request.

    Returns int32 ``[N, width + 1]``, padded with -1 and with the number of tokens in the last column, and
    int32 ``[N]``.
    """
    plan, device = inputs.plan, inputs.q.device
    size = inputs.rows_per_group
    tokens = torch.full((len(inputs.q), width + 1), -1, dtype=torch.int32, device=device)
    request = torch.full((len(inputs.q),), -1, dtype=torch.int32, device=device)
    listed = torch.arange(plan.blocks.shape[1], device=device) < plan.counts[:, None]  # [G, U]
    within = torch.arange(BLOCK_TOKENS, device=device)
    for member in range(size):
        has = member < plan.group_rows
        rows = (plan.group_start + member)[has].long()
        sees = ((plan.masks[has][..., None] >> (BLOCK_TOKENS * member + within)) & 1).bool()
        sees = (sees & listed[has][..., None]).flatten(1)  # [g, 4 U]
        token = (plan.blocks[has][..., None] * BLOCK_TOKENS + within).flatten(1).int()
        column = sees.cumsum(1) - 1
        group, entry = sees.nonzero(as_tuple=True)
        tokens[rows[group], column[group, entry]] = token[group, entry]
        tokens[rows, width] = sees.sum(dim=1).int()
        request[rows] = plan.group_request[has]
    return tokens, request
