"""The sparse layer on the Triton kernels: prepare, score, select and plan, attend."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from page4.kernels.block_plan import MAX_GROUP_ROWS, PackedPlan, RowGroups, plan_capacity
from page4.kernels.block_select_triton import SelectionWorkspace, empty_plan, select_plan_triton
from page4.kernels.errors import InputError
from page4.kernels.index_scores_triton import index_scores_triton
from page4.kernels.page4_attention_dispatch import page4_attention
from page4.kernels.page4_attention_inputs import AttentionInputs
from page4.kernels.qsa_configs import prepare_config, scores_config
from page4.kernels.qsa_prepare_inputs import QSANorms, QSAStorage
from page4.kernels.qsa_prepare_triton import qsa_prepare_triton, rotary_table
from page4.kernels.step_rows import StepRows
from page4.kvcache.cache import QSALayerCache
from page4.kvcache.intervention import UNCHANGED
from page4.kvcache.pages import BlockTables

from .config import Qwen4ExpConfig
from .rows import RowBatch
from .step import Step

if TYPE_CHECKING:
    from .qsa import QSAttention


@dataclass(frozen=True)
class KernelStep:
    """What the Triton kernels of the sparse layers read and reuse, layer after layer.

    Attributes:
        rows: requests, positions and slots of the rows.
        groups: adjacent rows that share a list of blocks: a decoding request's rows, or 8 rows of a prompt.
        scores: FP32 ``[N, NB]`` workspace of index scores.
        selection: workspace of the selection.
        plan: the plan, overwritten by every layer.
    """

    rows: StepRows
    groups: RowGroups
    scores: Tensor
    selection: SelectionWorkspace
    plan: PackedPlan

    @classmethod
    def of(cls, batch: RowBatch, tables: BlockTables, config: Qwen4ExpConfig) -> KernelStep:
        """Lists and workspaces for a batch of a model that passed ``checked_backend``.

        Nothing waits for the device. Work follows the rows' positions; the workspaces' width follows the
        groups' bounds of length.
        """
        device = batch.positions.device
        max_blocks = -(-max(group.longest for group in batch.groups) // config.indexer_compress_ratio)
        rows = _step_rows(batch, tables)
        groups = _row_groups(batch)
        scores = batch.positions.new_empty(len(batch.positions), max_blocks, dtype=torch.float32)
        selection = SelectionWorkspace.allocate(len(batch.positions), max_blocks, config.block_topk, device)
        capacity = plan_capacity(groups.rows_per_group, config.block_topk, max_blocks)
        return cls(rows, groups, scores, selection, empty_plan(groups, capacity))


def _step_rows(batch: RowBatch, tables: BlockTables) -> StepRows:
    fields = []
    for group in batch.groups:
        shape = (len(group.requests), group.length)
        index = torch.arange(group.length, device=group.requests.device)
        fields.append(
            torch.stack(
                [
                    group.requests[:, None].expand(shape),
                    index.expand(shape),
                    torch.full_like(index, group.length).expand(shape),
                ]
            ).flatten(1)
        )
    request, index, count = torch.cat(fields, dim=1).int().unbind()
    slots = tables.slots(request.long(), batch.positions)
    return StepRows(batch.positions, request, index, count, slots, tables.tensor)


def _row_groups(batch: RowBatch) -> RowGroups:
    rows_per_group = min(MAX_GROUP_ROWS, max(group.length for group in batch.groups))
    triples = []
    for group in batch.groups:
        device = group.requests.device
        offset = torch.arange(0, group.length, rows_per_group, device=device)
        request = group.requests[:, None].expand(-1, len(offset))
        start = (
            group.start + group.length * torch.arange(len(group.requests), device=device)[:, None] + offset
        )
        rows = (group.length - offset).clamp_max(rows_per_group).expand_as(request)
        triples.append(torch.stack([request, start, torch.where(request < 0, 0, rows)]).flatten(1))
    request, start, rows = torch.cat(triples, dim=1).int().unbind()
    return RowGroups(request, start, rows, rows_per_group)


def attend_triton(layer: QSAttention, x: Tensor, step: Step, cache: QSALayerCache) -> Tensor:
    """Gated attention ``[N, Hq, D]`` of a step's rows ``[N, H]``; writes their K, V and index keys."""
    if cache.intervention is not UNCHANGED:
        raise InputError("interventions in K and V need backend 'reference', the model runs on 'triton'")
    kernels, indexer = step.kernels, layer.indexer
    q_gate = layer.q_proj(x).unflatten(-1, (layer.heads, 2 * layer.head_dim))
    k = layer.k_proj(x).unflatten(-1, (layer.kv_heads, layer.head_dim))
    v = layer.v_proj(x).unflatten(-1, (layer.kv_heads, layer.head_dim))
    norms = QSANorms(
        q=layer.q_norm.weight,
        k=layer.k_norm.weight,
        index_q=indexer.q_layernorm.weight,
        index_k=indexer.k_layernorm.weight,
    )
    angles = _angles(step.config.max_position_embeddings, indexer.rotary_dim, indexer.rope_theta, x.device)
    storage = QSAStorage(
        kv_format=cache.format.name,
        k_pages=cache.k_pages,
        v_pages=cache.v_pages,
        ring=cache.ring,
        compressed_pages=cache.compressed_pages,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        k_scale_pages=cache.k_token_scales,
        v_scale_pages=cache.v_token_scales,
    )
    index = indexer.index_qk_proj(x)
    prepare = prepare_config(q_gate, k, index, storage)
    q, index_q = qsa_prepare_triton(
        q_gate, k, v, index, norms, angles, kernels.rows, storage, layer.eps,
        rows_per_program=prepare.rows_per_program,
    )  # fmt: skip
    positions, tables = kernels.rows.positions, kernels.rows.block_tables
    keys, groups = cache.compressed_pages, kernels.groups
    config = scores_config(index_q, keys, groups, kernels.scores)
    index_scores_triton(index_q, keys, tables, positions, groups, kernels.scores, config)
    plan = select_plan_triton(kernels.scores, positions, kernels.groups, kernels.selection, kernels.plan)
    inputs = AttentionInputs(
        q=q,
        k_pages=cache.k_pages,
        v_pages=cache.v_pages,
        block_tables=tables,
        plan=plan,
        rows_per_group=kernels.groups.rows_per_group,
        kv_format=cache.format.name,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        softmax_scale=layer.softmax_scale,
        gate=q_gate[..., layer.head_dim :],
        k_token_scales=cache.k_token_scales,
        v_token_scales=cache.v_token_scales,
    )
    out, _ = page4_attention(inputs)
    return out


@functools.cache
def _angles(positions: int, rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    return rotary_table(positions, rotary_dim, theta, device)
