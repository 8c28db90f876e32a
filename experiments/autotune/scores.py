"""Index scores as something to tune."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from page4.experiments.autotune.machine import Machine
from page4.experiments.autotune.problem import Check, Problem
from page4.experiments.kernel_cases import INDEX_HEADS, ScoreInputs, StepShape, score_copies
from page4.kernels.block_plan import BLOCK_TOKENS
from page4.kernels.index_scores_triton import (
    ScoresConfig,
    default_scores_config,
    index_scores_triton,
    on_volta_tensor_cores,
)
from page4.kernels.qsa_prepare import PAGE_TOKENS
from page4.kernels.tunable import ScoresKey

_MOST_GROUPS = 16  # groups that are compared with float64; more are sampled evenly


class ScoresProblem(Problem):
    """Index scores over paged compressed keys in FP16, whatever the format of K and V."""

    name = "index_scores_triton"

    def key(self, step: StepShape) -> ScoresKey:
        """The key of the step's inputs."""
        return ScoresKey(
            groups=step.requests * -(-step.rows // step.rows_per_group),
            rows_per_group=step.rows_per_group,
            index_heads=INDEX_HEADS,
            index_dim=step.index_dim,
            columns=1 << (step.max_blocks - 1).bit_length(),
        )

    def copies(self, step: StepShape, device: torch.device, seed: int, copies: int) -> list[ScoreInputs]:
        """Inputs over one pool of pages."""
        return score_copies(step, device, seed, copies)

    def bytes_moved(self, inputs: ScoreInputs) -> int:
        """Each request's keys once for every group, and the scores."""
        keys = 2 * inputs.index_q.shape[2] * inputs.scores.shape[1] * len(inputs.groups.rows)
        return keys + 4 * inputs.scores.numel()

    def default(self, inputs: ScoreInputs) -> ScoresConfig:
        """The launcher's own."""
        return default_scores_config(narrow=True, volta=_on_volta(inputs))

    def candidates(self, inputs: ScoreInputs, machine: Machine) -> list[Any]:
        """Tiles, with 2 to 16 programs a multiprocessor."""
        per_multiprocessor = (2, 4, 8, 16)
        if _on_volta(inputs):
            return [
                ScoresConfig(a_warp * num_warps, count * machine.multiprocessors, num_warps, num_stages=1)
                for a_warp, count, num_warps in itertools.product((8, 16), per_multiprocessor, (2, 4, 8))
            ]
        return [
            ScoresConfig(tile_blocks, count * machine.multiprocessors, num_warps, num_stages)
            for tile_blocks, count, num_warps, num_stages in itertools.product(
                (32, 64, 128, 256), per_multiprocessor, (4, 8), (2, 3, 4)
            )
        ]

    def run(self, inputs: ScoreInputs, config: ScoresConfig) -> Tensor:
        """Call the launcher."""
        return index_scores_triton(**vars(inputs), config=config)

    def check(self, inputs: ScoreInputs) -> Check:
        """Compare with float64."""
        rows, expected = _exact(inputs)
        visible = (inputs.positions[rows] + 1) // BLOCK_TOKENS
        seen = torch.arange(inputs.scores.shape[1], device=rows.device) < visible[:, None]

        def difference(config: Any) -> str | None:
            inputs.scores.fill_(torch.nan)  # whatever is not written is wrong
            scores = self.run(inputs, config)[rows].double()
            error = (scores - expected).abs()[seen]
            # FP32 sums of 4 x 128 products of the size of 1, over sqrt(128).
            return None if bool((error <= 1e-4).all()) else f"a score is off by {float(error.max()):.3g}"

        return difference


def _on_volta(inputs: ScoreInputs) -> bool:
    return on_volta_tensor_cores(inputs.index_q, inputs.compressed_pages, inputs.groups.rows_per_group)


def _exact(inputs: ScoreInputs) -> tuple[Tensor, Tensor]:
    """Rows ``[n]`` of some groups, and their scores in float64 ``[n, NB]``."""
    groups = inputs.groups
    step = max(1, -(-len(groups.rows) // _MOST_GROUPS))
    per_page = PAGE_TOKENS // BLOCK_TOKENS
    block = torch.arange(inputs.scores.shape[1], device=inputs.scores.device)
    rows, scores = [], []
    for group in range(0, len(groups.rows), step):
        start, size = int(groups.start[group]), int(groups.rows[group])
        page = inputs.block_tables[int(groups.request[group])][block // per_page]
        keys = inputs.compressed_pages[page, block % per_page].double()  # [NB, Di]
        queries = inputs.index_q[start : start + size].double()  # [M, Hi, Di]
        dot = torch.einsum("mhd,nd->mhn", queries, keys).relu()
        rows.append(torch.arange(start, start + size, device=block.device))
        scores.append(dot.sum(dim=1) * keys.shape[1] ** -0.5)
    return torch.cat(rows), torch.cat(scores)
