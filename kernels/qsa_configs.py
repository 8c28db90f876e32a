"""Configurations of the sparse layer's kernels beside attention: tuned ones, or those that a rule gives."""

from __future__ import annotations

from torch import Tensor

from page4.kernels.block_plan import RowGroups
from page4.kernels.index_scores_triton import ScoresConfig, default_scores_config, on_volta_tensor_cores
from page4.kernels.qsa_prepare_inputs import QSAStorage
from page4.kernels.qsa_prepare_triton import PrepareConfig, default_prepare_config
from page4.kernels.tunable import PrepareKey, ScoresKey
from page4.kernels.tuning import active


def prepare_config(q_gate: Tensor, k: Tensor, index: Tensor, storage: QSAStorage) -> PrepareConfig:
    """The configuration of :func:`~page4.kernels.qsa_prepare_triton.qsa_prepare_triton` for a call.

    Costs a look into a dictionary once a shape was seen.

    Raises:
        InputError: an unusable file of configurations.
    """
    configurations, device = active(), q_gate.device

    def find() -> PrepareConfig:
        key = PrepareKey.of(q_gate, k, index, storage)
        default = default_prepare_config(q_gate.shape[0], device)
        tuned = q_gate.element_size() == 2
        config: PrepareConfig = configurations.resolve(
            "qsa_prepare_triton", key, device, default, tuned
        ).config
        return config

    seen = ("prepare", q_gate.shape, k.shape, index.shape, q_gate.dtype, storage.kv_format, device)
    return configurations.once(seen, find)


def scores_config(
    index_q: Tensor, compressed_pages: Tensor, groups: RowGroups, scores: Tensor
) -> ScoresConfig:
    """The configuration of :func:`~page4.kernels.index_scores_triton.index_scores_triton` for a call.

    Costs a look into a dictionary once a shape was seen.

    Raises:
        InputError: an unusable file of configurations.
    """
    configurations, device = active(), index_q.device
    narrow = max(index_q.element_size(), compressed_pages.element_size()) == 2

    def find() -> ScoresConfig:
        volta = on_volta_tensor_cores(index_q, compressed_pages, groups.rows_per_group)
        key, default = ScoresKey.of(index_q, groups, scores), default_scores_config(narrow, volta)
        config: ScoresConfig = configurations.resolve(
            "index_scores_triton", key, device, default, tuned=narrow
        ).config
        return config

    rows = groups.rows_per_group
    seen = ("scores", index_q.shape[1:], len(groups.rows), rows, scores.shape[1], narrow, device)
    return configurations.once(seen, find)
